"""The grid: which cells there are, which are missing, and their running, one after the other, with progress."""

import dataclasses
import errno
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from attnorm.bench.report import new_report
from attnorm.lengthbench.cell import num_updates, run_cell, settings_of
from attnorm.lengthbench.contenders import Contender, parse_contender
from attnorm.lengthbench.programs import Programs
from attnorm.lengthbench.store import Cell, DamagedCell, cell_path, read_cell, write_cell
from attnorm.lengthbench.suites import Suite
from attnorm.lengthbench.tasks import TASKS
from attnorm.training.metrics import Progress


class GridError(ValueError):
    """A grid that cannot be run; nothing was trained or written."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """All cells of a command, and where they are."""

    suite: Suite
    cells: tuple[tuple[str, Contender], ...]  # pairs of a task and a contender
    out: Path
    command: str

    @functools.cached_property
    def specs(self) -> dict[str, Any]:
        return {task: TASKS[task](self.suite.name) for task, _ in self.cells}

    def path(self, task: str, contender: Contender) -> Path:
        return cell_path(self.out, task, contender.name)


def make_grid(
    suite: Suite,
    out: Path,
    command: str,
    contenders: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
) -> Grid:
    """The grid of a suite, or of the contenders and tasks that are named.

    Raises:
      GridError: an unknown task or contender, by name; or a folder that holds something else.
    """
    cells = []
    for task, name in suite.cells(tuple(contenders or ()), tuple(tasks or ())):
        if task not in TASKS:
            raise GridError(f"tasks must be of {', '.join(TASKS)}, got {task!r}")
        try:
            cells.append((task, parse_contender(name, suite.temperatures)))
        except (TypeError, ValueError) as error:
            raise GridError(f"normalizers: {name!r}: {error}") from error
    if len(set(cells)) < len(cells):
        raise GridError("normalizers and tasks must be without repetition")
    if out.exists() and not (out / "cells").is_dir() and any(out.iterdir()):
        raise GridError(f"out must be a new or empty folder, or one of this command, got {out}")
    return Grid(suite, tuple(cells), out, command)


def run(grid: Grid) -> list[Cell]:
    """All cells of the grid; those that are complete are read, the others are run and written, each when it is done.

    Raises:
      GridError, OSError: a cell of other settings, or a folder that cannot be written, before anything is run.
    """
    found = {}
    for task, contender in grid.cells:
        path = grid.path(task, contender)
        try:
            cell = read_cell(path)
        except DamagedCell as error:
            print(f"damaged, and run again: {error}", flush=True)
            continue
        if cell is not None:
            _require_settings(path, cell, settings_of(grid.suite, grid.specs[task]))
            found[task, contender] = cell
    tasks = list(grid.specs)
    missing = [pair for pair in grid.cells if pair not in found]
    missing.sort(key=lambda pair: tasks.index(pair[0]))
    updates = {(t, c): num_updates(grid.suite, grid.specs[t], c) for t, c in missing}
    print(
        f"suite {grid.suite.name}: {len(grid.cells)} cells, {len(found)} of them complete; "
        f"{sum(updates.values()):,} updates to do, on {jax.devices()[0].device_kind}",
        flush=True,
    )
    if missing:
        _require_writable(grid.out / "cells")
    progress = Progress(0, max(1, sum(updates.values())))
    done, last_task = 0, None
    programs: dict[Any, Programs] = {}
    try:
        for task, contender in missing:
            start = time.monotonic()
            name = f"{task}, {contender.name}"
            progress.print(f"{name}: compiling and training")
            spec = grid.specs[task]
            if task != last_task:
                programs, last_task = {}, task
            # What a program has of a contender is this alone; the normaliser is an argument.
            kind = contender.output, contender if contender.learned else None
            if kind not in programs:
                programs[kind] = Programs(spec.make(contender, grid.suite), grid.suite)
            results = run_cell(programs[kind], grid.suite, contender, _advance(progress, done, name))
            made = new_report(
                "length benchmark",
                command=grid.command,
                device=jax.devices()[0].device_kind,
                seconds=round(time.monotonic() - start, 1),
            )
            cell = {
                "task": task,
                "contender": contender.name,
                "settings": settings_of(grid.suite, spec),
                **results,
                "made": made,
            }
            write_cell(grid.path(task, contender), cell)
            found[task, contender] = cell
            done += updates[task, contender]
    finally:
        progress.close()
    return [found[pair] for pair in grid.cells]


def _advance(progress: Progress, done: int, name: str) -> Callable[[int, str | None], None]:
    def advance(count, message):
        nonlocal done
        done += count
        progress.step(done, message and f"{name}  {message}")

    return advance


def _require_writable(folder: Path) -> None:
    """An OSError now, not when the first cell is done."""
    folder.mkdir(parents=True, exist_ok=True)
    if not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _require_settings(path: Path, cell: Cell, wanted: dict[str, Any]) -> None:
    changed = [
        f"{section}.{key} was {cell['settings'][section].get(key)!r}, now {value!r}"
        for section, values in wanted.items()
        for key, value in values.items()
        if cell["settings"][section].get(key) != value
    ]
    if changed:
        raise GridError(f"{path} is of other settings: {'; '.join(changed)}. Choose another --out.")
