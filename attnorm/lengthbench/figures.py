"""A figure for each task: its metric and what attention does, against length."""

import io
import math
from collections.abc import Sequence

import matplotlib
from matplotlib.figure import Figure

from attnorm.lengthbench.statistics import diagnostic_median, range_of
from attnorm.lengthbench.store import Cell
from attnorm.lengthbench.suites import MAIN

# Okabe and Ito's palette: distinct also without red-green vision.
_COLORS = ("#000000", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("-", "--", ":")

_DIAGNOSED = {
    "effective_keys": "N_eff",
    "output_variance": "output variance",
    "right_share": "share on the right keys",
}


def task_figure(task: str, spec, cells: Sequence[Cell]) -> bytes:
    """SVG: medians over the seeds that passed the gate, a line for each contender, and the range of the metric.

    A contender without such seeds has a cross at the training length, where the gate is.
    """
    with matplotlib.rc_context(
        {
            "font.size": 10,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "svg.fonttype": "none",
            "svg.hashsalt": "attnorm",  # equal numbers give equal files
        }
    ):
        figure = Figure(figsize=(11, 6.4), layout="constrained")
        (main, *others) = figure.subplots(2, 2).ravel()
        for index, cell in enumerate(cells):
            look = {
                "color": _COLORS[index % len(_COLORS)],
                "linestyle": _DASHES[index // len(_COLORS) % len(_DASHES)],
                "label": cell["contender"],
            }
            _draw_metric(main, cell, spec, look)
            for axes, name in zip(others, _DIAGNOSED, strict=True):
                _draw_diagnostic(axes, cell, spec, name, look)
        lengths = sorted({row["length"] for cell in cells for row in cell["rows"]})
        chance = [spec.chance(length) for length in lengths]
        main.plot(lengths, chance, color="0.5", linewidth=1, label="guess")
        main.set_ylabel(spec.metric)
        if spec.is_ratio:
            main.set_yscale("log")
        for axes, label in zip(others, _DIAGNOSED.values(), strict=True):
            axes.set_ylabel(label)
        for axes in others[:2]:
            axes.set_yscale("log")
        for axes in (main, *others):
            axes.set_xscale("log", base=2)
            ticks = lengths[:: math.ceil(len(lengths) / 6)]
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set_xlim(lengths[0] / 1.2, lengths[-1] * 1.2)
            axes.minorticks_off()
            axes.axvline(spec.length, color="0.7", linewidth=1, linestyle=":", zorder=0)
            axes.grid(axis="y", color="0.93")
            axes.set_axisbelow(True)
        figure.legend(*main.get_legend_handles_labels(), loc="outside right upper", frameon=False)
        figure.suptitle(f"{task}: trained at length {spec.length} (dotted)")
        figure.supxlabel("length")
        content = io.BytesIO()
        figure.savefig(content, format="svg", metadata={"Date": None})
    return content.getvalue()


def _draw_metric(axes, cell, spec, look):
    lengths = sorted({(row["factor"], row["length"]) for row in cell["rows"]})
    ranges = [(length, range_of(cell, spec, factor, MAIN)) for factor, length in lengths]
    read = [(length, r) for length, r in ranges if r.median is not None]
    if not read:
        at_gate = range_of(cell, spec, 1, MAIN, gated=False).median
        axes.plot([spec.length], [math.nan if at_gate is None else at_gate], marker="x", **look)
        return
    x = [length for length, _ in read]
    axes.plot(x, [r.median for _, r in read], marker="o", markersize=3, **look)
    axes.fill_between(
        x,
        [r.lowest for _, r in read],
        [r.highest for _, r in read],
        color=look["color"],
        alpha=0.1,
        linewidth=0,
    )


def _draw_diagnostic(axes, cell, spec, name, look):
    lengths = sorted({(row["factor"], row["length"]) for row in cell["diagnostics"]})
    medians = [(length, diagnostic_median(cell, spec, name, factor, MAIN)) for factor, length in lengths]
    read = [(length, median) for length, median in medians if median is not None]
    if read:
        axes.plot(*zip(*read, strict=True), marker="o", markersize=3, **look)
