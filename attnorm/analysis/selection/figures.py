"""The five figures, drawn from their tables."""

import math

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.figure import Figure

_COLORS = {
    "true": "#0072B2", "expected": "#E69F00", "bound": "#D55E00", "ours": "#009E73", "other": "#CC79A7"
}  # fmt: skip


def draw(name: str, table: list[dict], title: str) -> Figure:
    """The figure of that name, with a panel per normaliser.

    Args:
      name: "2a", "2b", "2c", "3" or "4".
      table: the rows of its CSV.
      title: says what was measured on what.
    """
    normalizers = list(dict.fromkeys(row["normalizer"] for row in table))
    with matplotlib.rc_context(
        {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True}
    ):
        figure = Figure(figsize=(1.2 + 4.4 * len(normalizers), 4.3), dpi=130, layout="constrained")
        panels = figure.subplots(1, len(normalizers), sharey=name in ("2c", "3"), squeeze=False)[0]
        for axes, normalizer in zip(panels, normalizers, strict=True):
            _PANELS[name](axes, [row for row in table if row["normalizer"] == normalizer])
            axes.set_title(normalizer, fontsize=11)
            axes.grid(color="0.92")
        handles: dict[str, Artist] = {}
        for axes in panels:
            handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        figure.legend(
            handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9
        )
        figure.suptitle(title, fontsize=10)
    return figure


def _heads_against(axes, table, x_key, x_label):
    xs = sorted({row[x_key] for row in table})
    for key, label, color, style in (
        ("distance", "d̃ of the N largest weights", "true", "-"),
        ("bound", "its bound (Theorem 1.1 as proved)", "bound", "--"),
        ("expected", "E d̃ of random selections", "expected", "-"),
    ):
        by_x = [[row[key] for row in table if row[x_key] == x] for x in xs]
        axes.plot(
            xs, [np.mean(ys) for ys in by_x], style, marker="o", ms=3.5, color=_COLORS[color], label=label
        )
        low, high = ([np.quantile(ys, q) for ys in by_x] for q in (0.1, 0.9))
        axes.fill_between(xs, low, high, color=_COLORS[color], alpha=0.13, linewidth=0)
    for key in ("expected_low", "expected_high"):
        means = [np.mean([row[key] for row in table if row[x_key] == x]) for x in xs]
        axes.plot(xs, means, ":", color=_COLORS["expected"], label="bounds on E d̃ (Theorem 1.2 as proved)")
    axes.set_xscale("log", base=2 if x_key == "length" else 10)
    axes.set_yscale("log")
    axes.set_xticks(xs, [str(x) for x in xs])
    axes.minorticks_off()
    axes.set_xlabel(x_label)
    axes.set_ylabel("distance (mean and 80 % of heads)")


def _by_length(axes, table):
    _heads_against(axes, table, "length", f"length L  (N = {table[0]['num_selected']})")


def _by_num_selected(axes, table):
    _heads_against(axes, table, "num_selected", f"selected keys N  (L = {table[0]['length']})")


def _critical(axes, table):
    lengths = sorted({row["length"] for row in table})
    axes.plot(lengths, [0.06 * L for L in lengths], "--", color="0.5", label="0.06 L, as the paper reports")
    for label, marker, wanted in (("critical N", "o", True), ("larger than", "^", False)):
        points = []
        for L in lengths:
            rows = [row for row in table if row["length"] == L]
            if math.isnan(rows[0]["is_critical"]):
                continue
            critical = [row["num_selected"] for row in rows if row["is_critical"]]
            if bool(critical) == wanted:
                points.append((L, critical[0] if critical else max(row["num_selected"] for row in rows)))
        axes.plot(
            *(zip(*points, strict=True) if points else ((), ())),
            marker,
            color=_COLORS["true" if wanted else "bound"],
            label=label,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(lengths, [str(L) for L in lengths])
    axes.set_xlabel("length L")
    axes.set_ylabel("critical N")


def _separability(axes, table):
    nums = sorted({row["num_selected"] for row in table})
    places = np.arange(len(nums))
    boxes = [[row["recall"] for row in table if row["num_selected"] == N] for N in nums]
    drawn = axes.boxplot(boxes, positions=places, widths=0.5, showfliers=False, patch_artist=True)
    for box in drawn["boxes"]:
        box.set(facecolor="#CFE3F1", edgecolor=_COLORS["true"])
    for key, label, color, style in (
        ("low", "Theorem 2, lower side", "ours", "-"),
        ("paper_high", "Theorem 2, upper side, the paper's form", "bound", "--"),
        ("high", "upper side as proved", "expected", "-"),
        ("value_f", "F in value space", "other", ":"),
    ):
        means = [np.mean([row[key] for row in table if row["num_selected"] == N]) for N in nums]
        axes.plot(places, means, style, color=_COLORS[color], marker=".", label=label)
    axes.axhspan(0.7, 0.85, color="0.9", zorder=0, label="0.70-0.85, as the paper reports")
    axes.set_xticks(places, [str(N) for N in nums])
    axes.set_ylim(-0.02, 1.05)
    axes.set_xlabel(f"selected keys N  (L = {table[0]['length']})")
    axes.set_ylabel("N_s / N (boxes: heads)")


def _gradients(axes, table):
    steps = sorted({row["step"] for row in table})
    for step, color in zip(steps, ("true", "ours", "other", "expected") * len(steps), strict=False):
        rows = sorted((row for row in table if row["step"] == step), key=lambda row: row["temperature"])
        temperatures = [row["temperature"] for row in rows]
        axes.plot(
            temperatures, [row["difference"] for row in rows], color=_COLORS[color], label=f"g, ε = {step:g}"
        )
    axes.plot(temperatures, [row["spectral_largest"] for row in rows], color="black", label="largest ‖J‖₂")
    for key, label, style in (
        ("paper_bound", "min(1/(4T), √2), the paper's bound", "--"),
        ("spectral_bound", "C_p / T, as proved", ":"),
    ):
        values = [row[key] for row in rows]
        if not any(math.isnan(value) for value in values):
            axes.plot(temperatures, values, style, color=_COLORS["bound"], label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("temperature T")
    axes.set_ylabel("change of the weights (max. over heads)")


_PANELS = {"2a": _by_length, "2b": _by_num_selected, "2c": _critical, "3": _separability, "4": _gradients}
