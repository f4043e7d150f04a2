"""The grid: which cells there are, which are missing, their running with progress, and what a folder has of them."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from attnorm.lengthbench.cell import num_updates, settings_of
from attnorm.lengthbench.contenders import parse_contender
from attnorm.lengthbench.store import Cell, DamagedCell, cell_path, read_cell
from attnorm.lengthbench.suites import Suite
from attnorm.lengthbench.tasks import TASKS
from attnorm.lengthbench.workers import Pair, Runner, cores, run_apart, run_here
from attnorm.training.metrics import Progress
from attnorm.training.workdir import locked


class GridError(ValueError):
    """A grid that cannot be run; nothing was trained or written."""


@dataclasses.dataclass(frozen=True)
class Grid:
    """All cells of a command, and where they are."""

    suite: Suite
    cells: tuple[Pair, ...]
    out: Path
    command: str

    @functools.cached_property
    def specs(self) -> dict[str, Any]:
        return {task: TASKS[task](self.suite.name) for task, _ in self.cells}

    @contextlib.contextmanager
    def claimed(self) -> Iterator[None]:
        """Until the context ends, or the process dies, no other run can write to the folder.

        Raises:
          WorkdirError: another run does.
          OSError: the folder cannot be written.
        """
        folder = self.out / "cells"
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder, "--out"):
            yield


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
            contender = parse_contender(name, suite.temperatures)
            contender.normalizers()
        except (TypeError, ValueError) as error:
            raise GridError(f"normalizers: {name!r}: {error}") from error
        cells.append((task, contender))
    if len(set(cells)) < len(cells):
        raise GridError("normalizers and tasks must be without repetition")
    if out.exists() and not (out / "cells").is_dir() and any(out.iterdir()):
        raise GridError(f"out must be a new or empty folder, or one of this command, got {out}")
    return Grid(suite, tuple(cells), out, command)


def default_processes() -> int:
    """On CPUs as many as there are cores, for XLA gains less from a second one; an accelerator has one process."""
    return len(cores()) if jax.devices()[0].platform == "cpu" else 1


def run(grid: Grid, num_processes: int = 1) -> list[str]:
    """Runs the cells of the grid that are not complete; each is written when it is done.

    Args:
      num_processes: from 2 on, that many cells run side by side, with a core each.

    Returns:
      What went wrong, by cell.

    Raises:
      GridError, OSError: a cell of other settings, one that cannot be read, or several processes on one accelerator,
        before anything is run.
    """
    platform = jax.devices()[0].platform
    if num_processes > 1 and platform != "cpu":
        raise GridError(f"jobs must be 1 on {platform}, which this process holds, got {num_processes}")
    missing = _missing(grid)
    board = _Board(grid, missing)
    runner = Runner(grid.suite, grid.out, grid.command)
    try:
        if num_processes == 1 or len(missing) == 1:  # one alone may have all cores
            run_here(missing, runner, board)
        else:
            run_apart(missing, runner, board, num_processes)
    finally:
        board.progress.close()
    return board.errors


def finished(grid: Grid) -> tuple[Grid, list[Cell]]:
    """All complete cells of the folder that are of this suite, also those that other commands have added."""
    suite = grid.suite
    found: dict[Pair, Cell] = {}
    for path in sorted((grid.out / "cells").glob("*/*.json")):
        try:
            cell = read_cell(path)
            if cell is None:  # removed since
                continue
            task = cell["task"]
            contender = parse_contender(cell["contender"], suite.temperatures)
            _require_settings(path, cell, settings_of(suite, TASKS[task](suite.name)))
        except (DamagedCell, GridError) as error:
            print(f"not in the report: {error}", flush=True)
        except (KeyError, TypeError, ValueError) as error:
            print(f"not in the report: {path}, of another version: {error!r}", flush=True)
        else:
            found[task, contender] = cell
    order = [*suite.cells((), ()), *((task, contender.name) for task, contender in grid.cells)]

    def place(pair):
        name = pair[0], pair[1].name
        return (order.index(name) if name in order else len(order), name)

    pairs = sorted(found, key=place)
    return dataclasses.replace(grid, cells=tuple(pairs)), [found[pair] for pair in pairs]


def _missing(grid: Grid) -> list[Pair]:
    """By task, so that what is compiled serves as many cells as it can."""
    missing = []
    for task, contender in grid.cells:
        path = cell_path(grid.out, task, contender.name)
        try:
            cell = read_cell(path)
        except DamagedCell as error:
            print(f"damaged, and run again: {error}", flush=True)
            cell = None
        if cell is None:
            missing.append((task, contender))
        else:
            _require_settings(path, cell, settings_of(grid.suite, grid.specs[task]))
    tasks = list(grid.specs)
    return sorted(missing, key=lambda pair: tasks.index(pair[0]))


class _Board:
    """Shows how far all cells together are, and keeps what went wrong."""

    def __init__(self, grid: Grid, missing: Sequence[Pair]):
        self.errors: list[str] = []
        self._left = {pair: num_updates(grid.suite, grid.specs[pair[0]], pair[1]) for pair in missing}
        total = sum(self._left.values())
        print(
            f"suite {grid.suite.name}: {len(grid.cells)} cells, {len(grid.cells) - len(missing)} of them complete; "
            f"{total:,} updates to do, on {jax.devices()[0].device_kind}",
            flush=True,
        )
        self._total = max(1, total)
        self.progress = Progress(0, self._total)

    def started(self, pair):
        self.progress.print(f"{_name(pair)}: compiling and training")

    def advanced(self, pair, count, message):
        self._left[pair] -= count
        self._step(message and f"{_name(pair)}  {message}")

    def ended(self, pair, error):
        self._left[pair] = 0
        self._step(None)
        if error is not None:
            self.errors.append(f"{_name(pair)}: {error.strip()}")
            self.progress.print(f"failed: {_name(pair)}; the others go on")

    def _step(self, message):
        self.progress.step(self._total - sum(self._left.values()), message)


def _name(pair: Pair) -> str:
    return f"{pair[0]}, {pair[1].name}"


def _require_settings(path: Path, cell: Cell, wanted: dict[str, Any]) -> None:
    found = cell["settings"]
    changed = [
        f"{section}.{key} was {found.get(section, {}).get(key)!r}, now {values.get(key)!r}"
        for section, values in wanted.items()
        for key in values
        if found.get(section, {}).get(key) != values[key]
    ]
    if changed:
        raise GridError(f"{path} is of other settings: {'; '.join(changed)}. Choose another --out.")
