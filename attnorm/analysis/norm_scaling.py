"""How the norm of the weights and of their Jacobian scale with the number of keys, for L1 and L2.

k of N keys have the logit z, the others 0. Everything about such a row follows in closed form from its two
weights, so N = 1e6 costs nothing. Two figures, each with its table:

* ``norm_scaling``: against N, z chosen separately for L1 and L2 so that the top weights sum to 0.95.
* ``norm_scaling_equal_logits``: against z, the same logits for L1 and L2, at N = 1e4.

Under L2 the sum of the k top weights lies in [k / sqrt(N), sqrt(k)]. Where k / sqrt(N) >= 0.95 no z > 0 gives
0.95, the search ends at z = 0, and the row is the uniform pattern: these points are marked ``at_zero``.

Source: the figure of "Attention Normalizes the Wrong Norm", convergentthinking.sh, 2025.
"""

import dataclasses
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attnorm.analysis.files import csv_bytes, png_bytes, write_atomically

TOP_SUM = 0.95
PATTERNS = {
    "one-hot": lambda num_keys: 1,
    "top-10": lambda num_keys: min(num_keys, 10),
    "top-√N": math.isqrt,
    "uniform": lambda num_keys: num_keys,
}
EQUAL_LOGITS_NUM_KEYS = 10_000

_SMALLEST_L1_LOGIT = 2.0
_LARGEST_L2_LOGIT = 50.0
_COLORS = {"one-hot": "#0072B2", "top-10": "#D55E00", "top-√N": "#009E73", "uniform": "#555555"}
_DASHES: dict[str, Any] = {
    "one-hot": "-",
    "top-10": (0, (6, 2)),
    "top-√N": (0, (3, 2)),
    "uniform": (0, (1, 1.5)),
}
_PANELS = {
    "l2_norm": r"norm of the weights  $\Vert y\Vert_2$",
    "jacobian_frobenius": r"Jacobian, Frobenius norm  $\Vert J\Vert_F$",
    "jacobian_spectral": r"Jacobian, spectral norm  $\Vert J\Vert_2$",
}


@dataclass(frozen=True)
class TwoLevelWeights:
    """L_p weights, p = 1 or 2, of N keys of which k have the logit z and the others 0.

    >>> weights = TwoLevelWeights(num_keys=10_000, num_top=1, logit=math.log(19 * 9999), p=2)
    >>> print(f"{weights.top:.5f} {weights.jacobian_frobenius:.2e}")
    1.00000 7.44e-04
    """

    num_keys: int
    num_top: int
    logit: float
    p: int

    @property
    def top(self) -> float:
        return math.exp(self.logit - self._log_norm)

    @property
    def rest(self) -> float:
        return math.exp(-self._log_norm)

    @property
    def top_sum(self) -> float:
        return self.num_top * self.top

    @property
    def l2_norm(self) -> float:
        return math.sqrt(self.num_top * self.top**2 + self._num_rest * self.rest**2)

    @property
    def jacobian_frobenius(self) -> float:
        return math.sqrt(
            (self.num_top - 1) * self.top**2
            + max(self._num_rest - 1, 0) * self.rest**2
            + self._exchange_norm**2
        )

    @property
    def jacobian_spectral(self) -> float:
        norms = [self._exchange_norm]
        if self.num_top > 1:
            norms.append(self.top)
        if self._num_rest > 1:
            norms.append(self.rest)
        return max(norms)

    # J maps directions within the top keys, within the other keys, and the plane of the two groups each to
    # themselves. On the first two it multiplies by the weight; on the plane it has rank 1, since J 1 = 0.

    @property
    def _exchange_norm(self) -> float:
        k, r = self.num_top, self._num_rest
        w_top, w_rest = self.top**self.p, self.rest**self.p
        return math.sqrt((k + r) * (r * (self.top * w_rest) ** 2 + k * (self.rest * w_top) ** 2) if r else 0)

    @property
    def _num_rest(self) -> int:
        return self.num_keys - self.num_top

    @property
    def _log_norm(self) -> float:
        # Divided by the largest exponential; logits are never negative here.
        others = self._num_rest * math.exp(-self.p * self.logit)
        return self.logit + math.log(self.num_top + others) / self.p


def logit_for_top_sum(num_keys: int, num_top: int, p: int) -> float:
    """The logit z at which the top weights sum to 0.95; at least 2 for p = 1, at least 0 for p = 2."""
    rest = num_keys - num_top
    if p == 1:
        odds = TOP_SUM / (1 - TOP_SUM)
        return max(math.log(odds * rest / num_top), _SMALLEST_L1_LOGIT) if rest else _SMALLEST_L1_LOGIT
    low, high = 0.0, _LARGEST_L2_LOGIT
    if TwoLevelWeights(num_keys, num_top, low, p).top_sum >= TOP_SUM:
        return low
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return middle
        if TwoLevelWeights(num_keys, num_top, middle, p).top_sum < TOP_SUM:
            low = middle
        else:
            high = middle


def scaling_rows() -> list[dict]:
    """The rows of ``norm_scaling.csv``: 64 values of N, four patterns, p = 1 and 2."""
    return [
        _row(pattern, TwoLevelWeights(num_keys, k, logit_for_top_sum(num_keys, k, p), p))
        for p in (1, 2)
        for pattern, num_top in PATTERNS.items()
        for num_keys in np.round(np.logspace(1, 6, 64)).astype(int).tolist()
        for k in [num_top(num_keys)]
    ]


def equal_logits_rows() -> list[dict]:
    """The rows of ``norm_scaling_equal_logits.csv``: logits from 0 to 16 at N = 1e4, p = 1 and 2."""
    return [
        _row(pattern, TwoLevelWeights(EQUAL_LOGITS_NUM_KEYS, num_top(EQUAL_LOGITS_NUM_KEYS), logit, p))
        for p in (1, 2)
        for pattern, num_top in PATTERNS.items()
        if pattern != "uniform"  # z shifts all its logits, and changes nothing
        for logit in sorted({*np.linspace(0, 16, 129).tolist(), _one_hot_logit()})
    ]


def write_norm_scaling(out: str | os.PathLike) -> list[Path]:
    """Write both figures and their tables into the folder ``out``; files of these names there are replaced.

    Returns:
      The paths of norm_scaling.csv, norm_scaling.png, norm_scaling_equal_logits.csv and
      norm_scaling_equal_logits.png.

    Raises:
      OSError: the folder cannot be made or written to.
      ModuleNotFoundError: matplotlib is not installed.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    scaling, equal_logits = scaling_rows(), equal_logits_rows()
    files = {
        "norm_scaling.csv": csv_bytes(scaling),
        "norm_scaling.png": png_bytes(_plot_scaling(scaling)),
        "norm_scaling_equal_logits.csv": csv_bytes(equal_logits),
        "norm_scaling_equal_logits.png": png_bytes(_plot_equal_logits(equal_logits)),
    }
    for name, content in files.items():
        write_atomically(out / name, content)
    return [out / name for name in files]


def _one_hot_logit() -> float:
    return logit_for_top_sum(EQUAL_LOGITS_NUM_KEYS, 1, 1)


def _row(pattern: str, weights: TwoLevelWeights) -> dict:
    return {
        "pattern": pattern,
        **dataclasses.asdict(weights),
        "at_zero": weights.logit == 0,
        "top_sum": weights.top_sum,
        "l2_norm": weights.l2_norm,
        "jacobian_frobenius": weights.jacobian_frobenius,
        "jacobian_spectral": weights.jacobian_spectral,
    }


def _plot_scaling(rows: list[dict]):
    from matplotlib.lines import Line2D

    figure, axes = _grid(rows=2)
    for row, p in enumerate((1, 2)):
        for axis, quantity in zip(axes[row], _PANELS, strict=True):
            # The widest line first, so that lines on top of each other all stay visible.
            for width, pattern in zip((4.2, 3.2, 2.2, 1.4), PATTERNS, strict=True):
                line = [r for r in rows if r["pattern"] == pattern and r["p"] == p]
                x, y = [r["num_keys"] for r in line], [r[quantity] for r in line]
                style = {"color": _COLORS[pattern], "linestyle": _DASHES[pattern], "linewidth": width}
                axis.plot(x, y, **style, alpha=0.9)
                zero = [i for i, r in enumerate(line) if r["at_zero"] and pattern != "uniform"]
                axis.plot(
                    [x[i] for i in zero],
                    [y[i] for i in zero],
                    linestyle="none",
                    marker="o",
                    markersize=4.5,
                    markerfacecolor="none",
                    markeredgecolor=_COLORS[pattern],
                )
            axis.set_xscale("log")
            axis.set_yscale("log")
            if row == 0:
                axis.set_title(_PANELS[quantity], fontsize=11)
            else:
                axis.set_xlabel("number of keys  $N$")
        axes[row][0].set_ylabel(f"L{p} softmax", fontsize=12, fontweight="bold")
    axes[1][0].text(3e3, 0.5, "1 for every pattern and every $N$", ha="center", fontsize=10)
    handles = [
        Line2D([], [], color=_COLORS[pattern], linestyle=_DASHES[pattern], linewidth=2, label=pattern)
        for pattern in PATTERNS
    ]
    handles.append(
        Line2D(
            [],
            [],
            linestyle="none",
            marker="o",
            markerfacecolor="none",
            markeredgecolor="black",
            label=f"no z > 0 sums to {TOP_SUM}: z = 0, uniform",
        )
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(f"Top-k weights that sum to {TOP_SUM}", fontsize=13)
    return figure


def _plot_equal_logits(rows: list[dict]):
    from matplotlib.lines import Line2D

    figure, axes = _grid(rows=1)
    patterns = [pattern for pattern in PATTERNS if pattern != "uniform"]
    marked = _one_hot_logit()
    for axis, quantity in zip(axes[0], _PANELS, strict=True):
        axis.axvline(marked, color="#BBBBBB", linewidth=1, zorder=0)
        for pattern in patterns:
            for p, linestyle in ((1, "-"), (2, "--")):
                line = [r for r in rows if r["pattern"] == pattern and r["p"] == p]
                axis.plot(
                    [r["logit"] for r in line],
                    [r[quantity] for r in line],
                    color=_COLORS[pattern],
                    linestyle=linestyle,
                    linewidth=1.8,
                )
                if pattern == "one-hot":
                    (y,) = [r[quantity] for r in line if r["logit"] == marked]
                    axis.plot([marked], [y], "o", color=_COLORS[pattern], markersize=4.5)
                    # The two norms of the weights are too close for a label above each.
                    offset = (5, -13) if quantity == "l2_norm" and p == 1 else (5, 4)
                    axis.annotate(
                        f"{y:.3g}", (marked, y), xytext=offset, textcoords="offset points", fontsize=8.5
                    )
        axis.set_yscale("log")
        axis.set_title(_PANELS[quantity], fontsize=11)
        axis.set_xlabel("logit  $z$  of the top keys")
    handles = [Line2D([], [], color=_COLORS[pattern], linewidth=2, label=pattern) for pattern in patterns]
    handles += [
        Line2D([], [], color="black", linestyle="-", linewidth=1.8, label="L1 softmax"),
        Line2D([], [], color="black", linestyle="--", linewidth=1.8, label="L2 softmax"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(
        f"The same logits for L1 and L2, N = {EQUAL_LOGITS_NUM_KEYS:,}"
        f"  (line: z = {marked:.3f}, one-hot weight {TOP_SUM} under L1)",
        fontsize=13,
    )
    return figure


def _grid(rows: int):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.1 * rows + 1.1), dpi=150, layout="constrained")
    axes = figure.subplots(rows, 3, squeeze=False, sharex=True, sharey="col")
    for axis in axes.flat:
        axis.grid(True, which="major", color="#E6E6E6", linewidth=0.8)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, axes
