"""The report of a grid: report.md, report.html, tables as CSV, and a figure for each task."""

import itertools
import math
import statistics as std
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnorm.analysis.files import csv_bytes, write_atomically
from attnorm.lengthbench.diagnostics import DIAGNOSTICS
from attnorm.lengthbench.document import Block, Heading, Image, Table, Text, as_html, as_markdown
from attnorm.lengthbench.figures import task_figure
from attnorm.lengthbench.grid import Grid
from attnorm.lengthbench.statistics import (
    Range,
    degradations,
    diagnostic_median,
    paired_gains,
    passed_seeds,
    range_of,
    rank_correlation,
    rank_correlation_p,
    sign_flip_p,
    sign_test_p,
)
from attnorm.lengthbench.store import Cell
from attnorm.lengthbench.suites import MAIN
from attnorm.lengthbench.tasks import CONTROL_OF

# What the others are compared with, seed by seed; where none is there, the first contender.
_REFERENCES = ("softmax", "l2")
_FEWEST_FOR_CORRELATION = 4
_NOTHING = "–"


def write_report(grid: Grid, cells: Sequence[Cell]) -> list[Path]:
    """Writes all files into the grid's folder, each as a whole, and returns their paths."""
    table = _Cells(grid, cells)
    images = {
        task: Image(
            f"figures/{task}.svg",
            task_figure(task, grid.specs[task], of_task),
            _caption(task, grid.specs[task], of_task),
        )
        for task, of_task in table.by_task.items()
    }
    blocks = _blocks(grid, table, images)
    files = {
        "report.md": as_markdown(blocks).encode(),
        "report.html": as_html("Length benchmark", blocks).encode(),
        "results.csv": csv_bytes(_flat(cells, "rows", grid.specs)),
        "sweep.csv": csv_bytes(_flat(cells, "sweep", grid.specs)),
        **{image.path: image.svg for image in images.values()},
    }
    diagnostics = _flat(cells, "diagnostics", grid.specs)
    if diagnostics:
        files["diagnostics.csv"] = csv_bytes(diagnostics)
    (grid.out / "figures").mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        write_atomically(grid.out / name, content)
    return [grid.out / name for name in files]


class _Cells:
    """The cells by task and contender, in the order of the command."""

    def __init__(self, grid: Grid, cells: Sequence[Cell]):
        self.by_task: dict[str, list[Cell]] = {}
        for cell in cells:
            self.by_task.setdefault(cell["task"], []).append(cell)
        self.contenders = list(dict.fromkeys(cell["contender"] for cell in cells))
        self._cells = {(cell["task"], cell["contender"]): cell for cell in cells}

    def get(self, task: str, contender: str) -> Cell | None:
        return self._cells.get((task, contender))


def _blocks(grid: Grid, table: _Cells, images: Mapping[str, Image]) -> list[Block]:
    factors = grid.suite.factors
    shown = sorted({factors[0], factors[len(factors) // 2], factors[-1]})
    blocks: list[Block] = [Heading("Length benchmark", 1), *_facts(grid, table), *_how_to_read(grid)]
    blocks += [Heading("At the training length"), _mastery_table(grid, table)]
    for factor in factors[1:]:
        blocks += [Heading(f"At {factor} times the training length"), _range_table(grid, table, factor)]
    for task, image in images.items():
        blocks += [Heading(task), image]
        blocks += _variants(grid, table, task)
    references = [name for name in _REFERENCES if name in table.contenders] or table.contenders[:1]
    if len(table.contenders) > 1:
        for reference, factor in itertools.product(references, shown):
            blocks += [
                Heading(f"Against {reference}, seed by seed, at {factor} times the training length"),
                _significance_table(grid, table, reference, factor),
            ]
    blocks += _task_controls(grid, table)
    blocks += _diagnostics(grid, table)
    blocks += _explanations(grid, table)
    blocks += _learned(table)
    return blocks


def _facts(grid: Grid, table: _Cells) -> list[Block]:
    made = [cell["made"] for cells in table.by_task.values() for cell in cells]

    def distinct(values):
        return ", ".join(dict.fromkeys(str(value) for value in values))

    seconds = sum(each["settings"]["seconds"] for each in made)
    rows = [
        ["command", distinct([grid.command, *(each["settings"]["command"] for each in made)])],
        ["commit of each cell", distinct(each["commit"] for each in made)],
        ["JAX", distinct(each["versions"]["jax"] for each in made)],
        ["device", distinct(each["settings"]["device"] for each in made)],
        ["processor", distinct(each["hardware"]["cpu"] for each in made)],
        ["dates", f"{min(each['date'] for each in made)} to {max(each['date'] for each in made)}"],
        ["cells", f"{len(made)}, {seconds / 60:.1f} minutes in all"],
        ["seeds", str(grid.suite.num_seeds)],
        ["learning rates", ", ".join(f"{rate:g}" for rate in grid.suite.learning_rates)],
    ]
    return [Table(["suite", grid.suite.name], rows)]


def _how_to_read(grid: Grid) -> list[Block]:
    num_seeds = grid.suite.num_seeds
    tasks = [
        [
            task,
            str(spec.length),
            str(spec.num_steps),
            spec.position,
            spec.metric + (" (higher is better)" if spec.higher_is_better else " (lower is better)"),
            f"{spec.mastery:g}",
            f"{spec.chance(spec.length):.3g}",
            spec.facts,
        ]
        for task, spec in grid.specs.items()
    ]
    return [
        Text(
            "Every number is of the last checkpoint. A contender's learning rate had the lowest loss on validation "
            "sequences of the training length, with a seed that is not reported; edge: it is the smallest or "
            "largest that was tried. A temperature was chosen likewise, with the best rate of the middle one. A "
            "seed that does not reach the gate at the training length is not read at other lengths: tables give the "
            "median (minimum to maximum) of the seeds that do, and how many these are where some do not."
        ),
        Text(
            "A gain is the mean difference of the metric between runs of the same seed, positive where the "
            "contender is better; of the logarithm where the metric is an error over that of a guess. At the training "
            "length all seeds count, at others those with which both pass the gate. Its p-value is that of sign "
            f"flips: with {_seeds(num_seeds)} no single p is below {2.0 ** (1 - num_seeds):g}. The last column has "
            "one vote a task, the sign of the mean gain over seeds, without tasks that are controls of others, and "
            "is not corrected for the number of tables."
        ),
        Table(["task", "training length", "updates", "positions", "metric", "gate", "guess", ""], tasks),
    ]


def _mastery_table(grid: Grid, table: _Cells) -> Table:
    """Without the gate, for here it is."""
    rates = grid.suite.learning_rates

    def text(cell, spec):
        r = range_of(cell, spec, 1, MAIN, gated=False)
        rate = cell["chosen"]["learning_rate"]
        edge = " (edge)" if rate in (min(rates), max(rates)) else ""
        return f"{_range(r)}, passed {r.num_passed}/{r.num_seeds}, rate {rate:g}{edge}"

    return _table(grid, table, text)


def _range_table(grid: Grid, table: _Cells, factor: int) -> Table:
    def text(cell, spec):
        r = range_of(cell, spec, factor, MAIN)
        return _range(r) + (f", {r.num_passed}/{r.num_seeds}" if 0 < r.num_passed < r.num_seeds else "")

    return _table(grid, table, text)


def _table(grid: Grid, table: _Cells, text) -> Table:
    rows = []
    for contender in table.contenders:
        cells = [(table.get(task, contender), spec) for task, spec in grid.specs.items()]
        rows.append([contender, *("" if cell is None else text(cell, spec) for cell, spec in cells)])
    return Table(["", *grid.specs], rows)


def _variants(grid: Grid, table: _Cells, task: str) -> list[Block]:
    spec = grid.specs[task]
    if len(spec.variants) == 1:
        return []
    columns = sorted(
        {(row["variant"], row["factor"]) for cell in table.by_task[task] for row in cell["rows"]},
        key=lambda column: (list(spec.variants).index(column[0]), column[1]),
    )
    rows = [
        [cell["contender"], *(_range(range_of(cell, spec, factor, variant)) for variant, factor in columns)]
        for cell in table.by_task[task]
    ]
    header = [f"{variant or 'as in training'}, ×{factor}" for variant, factor in columns]
    return [Table(["", *header], rows)]


def _significance_table(grid: Grid, table: _Cells, reference: str, factor: int) -> Table:
    """Gains by task; last, the sign test with one vote of each task that is no control of another."""
    rows = []
    for contender in table.contenders:
        if contender == reference:
            continue
        row, better, worse = [contender], 0, 0
        for task, spec in grid.specs.items():
            cell, other = table.get(task, contender), table.get(task, reference)
            if cell is None or other is None:
                row.append("")
                continue
            gains = paired_gains(cell, other, spec, factor, MAIN)
            if gains and task not in CONTROL_OF:
                better += std.mean(gains) > 0
                worse += std.mean(gains) < 0
            row.append(_gain(gains))
        row.append(f"{better} better, {worse} worse, p = {sign_test_p(better, worse):.2g}")
        rows.append(row)
    return Table(["gain", *grid.specs, "all tasks"], rows)


def _task_controls(grid: Grid, table: _Cells) -> list[Block]:
    """Each contender against itself on the task without the control, at every length."""
    rows = []
    for task, other in CONTROL_OF.items():
        for contender in table.contenders:
            cell, without = table.get(task, contender), table.get(other, contender)
            if cell is None or without is None:
                continue
            gains = [
                paired_gains(cell, without, grid.specs[task], factor, MAIN) for factor in grid.suite.factors
            ]
            rows.append([task, contender, *map(_gain, gains)])
    if not rows:
        return []
    header = ["gain", "", *(f"×{factor}" for factor in grid.suite.factors)]
    return [
        Heading("Against the task without the control, seed by seed"),
        Text(
            "counting_keep_optimizer keeps the optimiser's moments from stage to stage, and has no warm-up after the "
            "first. With and without, every stage cools down to a learning rate of almost 0."
        ),
        Table(header, rows),
    ]


def _gain(gains: Sequence[float]) -> str:
    """The mean, of how many pairs of seeds, and its p-value."""
    return f"{std.mean(gains):+.3g} (n = {len(gains)}, p = {sign_flip_p(gains):.2g})" if gains else _NOTHING


def _diagnostics(grid: Grid, table: _Cells) -> list[Block]:
    blocks: list[Block] = [
        Heading("What attention does"),
        Text(
            "Medians over the seeds that passed the gate, over the questions of "
            f"{_sequences(cell for cells in table.by_task.values() for cell in cells)}, at the training length and "
            "at the longest that was looked into. "
            + "; ".join(f"{name}: {meaning}" for name, meaning in DIAGNOSTICS.items())
            + "."
        ),
    ]
    for task, cells in table.by_task.items():
        spec = grid.specs[task]
        far = _farthest(cells)
        if far is None:
            continue
        rows = []
        for cell in cells:
            row = [cell["contender"]]
            for name in DIAGNOSTICS:
                pair = [diagnostic_median(cell, spec, name, factor, MAIN) for factor in (1, far)]
                row.append(" → ".join(_number(value) for value in pair))
            rows.append(row)
        blocks.append(Table([f"{task}, ×1 → ×{far}", *DIAGNOSTICS], rows))
    return blocks


def _explanations(grid: Grid, table: _Cells) -> list[Block]:
    """Does a drift of the variance go with a loss of precision?"""
    rows = []
    for task, cells in table.by_task.items():
        spec, far = grid.specs[task], _farthest(cells)
        if far in (None, 1):
            continue
        points = []
        for cell in cells:
            lost = degradations(cell, spec, far, MAIN)
            near_far = {
                name: [diagnostic_median(cell, spec, name, factor, MAIN) for factor in (1, far)]
                for name in ("output_variance", "effective_keys", "right_share")
            }
            # Not every task has right keys.
            change = {name: math.log(b / a) for name, (a, b) in near_far.items() if a and b}
            if lost and {"output_variance", "effective_keys"} <= change.keys():
                points.append((std.median(lost.values()), change))
        if len(points) < _FEWEST_FOR_CORRELATION:
            continue
        losses = [loss for loss, _ in points]
        moved: list[list[float | None]] = [
            [abs(change["output_variance"]) for _, change in points],
            [change["effective_keys"] for _, change in points],
            [change.get("right_share") for _, change in points],
        ]
        rows.append([f"{task}, ×{far}", str(len(points)), *(_correlation(x, losses) for x in moved)])
    if not rows:
        return []
    header = [
        "",
        "contenders",
        "drift of the output's variance",
        "growth of N_eff",
        "growth of the right share",
    ]
    return [
        Heading("Does variance explain it?"),
        Text(
            "Rank correlations, over the contenders with seeds that passed the gate, of how much worse they are "
            "than at the training length with how far the logarithm of a diagnostic has moved since; for the "
            "variance in either direction. p is of random orders, and not corrected for the number of tests."
        ),
        Table(header, rows),
    ]


def _learned(table: _Cells) -> list[Block]:
    rows = []
    for task, cells in table.by_task.items():
        for cell in cells:
            for name, by_seed in cell["learned"].items():
                for layer in range(len(by_seed[0])):
                    values = [x for seed in by_seed for x in seed[layer] if x is not None]
                    rows.append([task, cell["contender"], name, str(layer + 1), _spread(values)])
    if not rows:
        return []
    return [
        Heading("Learned parameters"),
        Text("Median (minimum to maximum) over heads and seeds, after training."),
        Table(["task", "", "parameter", "layer", "value"], rows),
    ]


def _farthest(cells: Sequence[Cell]) -> int | None:
    return max((row["factor"] for cell in cells for row in cell["diagnostics"]), default=None)


def _caption(task: str, spec: Any, cells: Sequence[Cell]) -> str:
    numbers = {row["factor"]: row["sequences"] for row in cells[0]["rows"] if row["variant"] == MAIN}
    return (
        f"{task}: {spec.metric} against length, and what attention does there; medians over the seeds that passed "
        "the gate, bands from minimum to maximum, a cross where none did; sequences of each seed: "
        + ", ".join(f"{number} at ×{factor}" for factor, number in sorted(numbers.items()))
    )


def _sequences(cells) -> str:
    numbers = {row["sequences"] for cell in cells for row in cell["diagnostics"]}
    return f"{' or '.join(map(str, sorted(numbers)))} sequences of each seed"


def _seeds(number: int) -> str:
    return "1 seed" if number == 1 else f"{number} seeds"


def _correlation(x: Sequence[float | None], y: Sequence[float]) -> str:
    known = [value for value in x if value is not None]
    rho = rank_correlation(known, y) if len(known) == len(x) else None
    return _NOTHING if rho is None else f"{rho:.3g} (p = {rank_correlation_p(known, y):.2g})"


def _range(r: Range) -> str:
    return _spread([x for x in (r.lowest, r.median, r.highest) if x is not None])


def _spread(values: Sequence[float]) -> str:
    return f"{std.median(values):.3g} ({min(values):.3g} to {max(values):.3g})" if values else _NOTHING


def _number(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.3g}"


def _flat(cells: Sequence[Cell], part: str, specs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One table of all cells; columns that a task does not have are empty."""
    rows = []
    for cell in cells:
        spec = specs[cell["task"]]
        for row in cell[part]:
            row = {"task": cell["task"], "contender": cell["contender"], **row}
            if part == "rows":
                row["guess"] = spec.chance(row["length"])
                row["passed"] = row["seed"] in passed_seeds(cell, spec)
            rows.append(row)
    columns = dict.fromkeys(name for row in rows for name in row)
    return [{name: row.get(name, "") for name in columns} for row in rows]
