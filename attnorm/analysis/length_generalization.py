"""How precise a model is at, below and beyond the length it was trained at: a table and a figure of results.csv."""

import csv
import dataclasses
import math
import os
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

_MAX_PANELS = 4
# Okabe and Ito's palette: distinct also without red-green vision.
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


@dataclasses.dataclass(frozen=True)
class Ratios:
    """MSE divided by the position-only floor, over the seeds."""

    median: float
    lowest: float
    highest: float


def read_ratios(results: Path) -> Mapping[tuple[int, str, int], Ratios]:
    """The ratios of a results.csv by trained length, normaliser and prefix, in the file's order.

    Raises:
      KeyError: a column is missing.
      ValueError: a line that is cut off, or holds something else than the numbers that belong there.
    """
    by_key: dict[tuple[int, str, int], list[float]] = {}
    with open(results, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(_whole_lines(file, results))
        for row in reader:
            if None in row.values():
                raise ValueError(f"{results}, line {reader.line_num} is cut off")
            try:
                key = int(row["trained_length"]), _name(row["normalizer"], row["p"]), int(row["prefix"])
                by_key.setdefault(key, []).append(float(row["ratio"]))
            except ValueError as error:
                raise ValueError(f"{results}, line {reader.line_num}: {error}") from None
    return {
        key: Ratios(statistics.median(ratios), min(ratios), max(ratios)) for key, ratios in by_key.items()
    }


def median_table(results: Path) -> str:
    """The median over seeds of the ratios of a results.csv, as text; ``*`` marks the trained length."""
    ratios = read_ratios(results)
    prefixes = sorted({prefix for _, _, prefix in ratios})
    lines = ["MSE / position-only MSE on the first b positions, median over seeds (* b = trained length)"]
    lines.append(f"{'trained':>8} {'':8} " + " ".join(f"{f'b={prefix}':>8} " for prefix in prefixes))
    rows = dict.fromkeys((length, name) for length, name, _ in ratios)
    for length, name in sorted(rows, key=lambda row: row[0]):
        cells = (f"{ratios[length, name, b].median:>8.3g}{'*' if b == length else ' '}" for b in prefixes)
        lines.append(f"{length:>8} {name:8} " + " ".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def draw(results: Path, figure_path: Path) -> None:
    """Draws the ratios of a results.csv against the prefix: a panel per trained length, a line per normaliser.

    Args:
      results: a results.csv.
      figure_path: the image, replaced as a whole.

    Raises:
      ValueError: results.csv has no rows; and as `read_ratios`.
    """
    ratios = read_ratios(results)
    if not ratios:
        raise ValueError(f"{results} has no rows")
    lengths = _spread_out(sorted({length for length, _, _ in ratios}), _MAX_PANELS)
    names = list(dict.fromkeys(name for _, name, _ in ratios))
    with matplotlib.rc_context(
        {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "svg.fonttype": "none"}
    ):
        figure = Figure(figsize=(1.2 + 3.3 * len(lengths), 3.9), layout="constrained")
        panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
        for axes, length in zip(panels, lengths, strict=True):
            _draw_panel(axes, ratios, length, names)
        panels[0].annotate(
            "trained length",
            (lengths[0], 0.03),
            xycoords=("data", "axes fraction"),
            xytext=(-4, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="bottom",
            color="0.35",
            fontsize=9,
        )
        panels[0].set_ylabel("MSE / position-only MSE")
        panels[0].legend(frameon=False, loc="best", title="norm of the weights")
        figure.supxlabel("length of the evaluated prefix", fontsize=11)
        figure.suptitle(
            "Counting: error at, below and beyond the trained length (median, min-max over seeds)",
            fontsize=12,
        )
        temporary = figure_path.with_name(figure_path.name + ".tmp")
        figure.savefig(temporary, dpi=160, format=figure_path.suffix[1:])
    os.replace(temporary, figure_path)


def _whole_lines(file: Iterable[str], path: Path) -> Iterator[str]:
    for number, line in enumerate(file, start=1):
        if not line.endswith("\n"):
            raise ValueError(f"{path}, line {number} is cut off")
        yield line


def _draw_panel(axes, ratios, length, names):
    for name, color in zip(names, _COLORS * len(names), strict=False):
        points = {b: r for (at, other, b), r in ratios.items() if at == length and other == name}
        prefixes = sorted(points)
        axes.plot(
            prefixes,
            [points[b].median for b in prefixes],
            color=color,
            marker="o",
            markersize=3.5,
            label=name,
        )
        lowest, highest = [points[b].lowest for b in prefixes], [points[b].highest for b in prefixes]
        axes.fill_between(prefixes, lowest, highest, color=color, alpha=0.13, linewidth=0)
    axes.axhline(1, color="0.35", linewidth=1, linestyle="--")
    axes.axvline(length, color="0.6", linewidth=1, linestyle=":", zorder=0)
    axes.annotate(
        "guess from the position alone", (0.02, 1), xycoords=("axes fraction", "data"), xytext=(0, 3),
        textcoords="offset points", color="0.35", fontsize=9,
    )  # fmt: skip
    axes.set_title(f"trained to length {length}", fontsize=11)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = prefixes[:: math.ceil(len(prefixes) / 5)]
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)


def _name(normalizer: str, p: str) -> str:
    if not p:
        return normalizer
    return f"p={float(p):g}" if normalizer == "lp" else f"{normalizer} p={float(p):g}"


def _spread_out(values, count):
    if len(values) <= count:
        return values
    return [values[round(i * (len(values) - 1) / (count - 1))] for i in range(count)]
