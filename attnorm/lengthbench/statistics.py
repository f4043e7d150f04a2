"""Numbers over seeds: who passed the gate, medians and ranges, and differences by paired seeds."""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from attnorm.lengthbench.store import Cell
from attnorm.lengthbench.suites import MAIN


@dataclasses.dataclass(frozen=True)
class Range:
    """Over the seeds that passed the gate; the numbers are None where none did."""

    median: float | None
    lowest: float | None
    highest: float | None
    num_passed: int
    num_seeds: int


def passed_seeds(cell: Cell, spec: Any) -> list[int]:
    """The seeds that mastered the training length: only of these other lengths are read."""
    return [
        row["seed"]
        for row in cell["rows"]
        if row["factor"] == 1 and row["variant"] == MAIN and _is_mastered(row[spec.metric], spec)
    ]


def values_by_seed(cell: Cell, spec: Any, factor: int, variant: str) -> dict[int, float]:
    """The task's metric where it is finite."""
    return {
        row["seed"]: row[spec.metric]
        for row in cell["rows"]
        if row["factor"] == factor and row["variant"] == variant and row[spec.metric] is not None
    }


def range_of(cell: Cell, spec: Any, factor: int, variant: str, gated: bool = True) -> Range:
    """Median, minimum and maximum of the task's metric; without the gate, over all seeds."""
    values = values_by_seed(cell, spec, factor, variant)
    passed = passed_seeds(cell, spec)
    read = [value for seed, value in values.items() if seed in passed or not gated]
    num_seeds = len({row["seed"] for row in cell["rows"]})
    if not read:
        return Range(None, None, None, len(passed), num_seeds)
    return Range(statistics.median(read), min(read), max(read), len(passed), num_seeds)


def paired_gains(cell: Cell, baseline: Cell, spec: Any, factor: int, variant: str) -> list[float]:
    """By how much the cell is better than the baseline, for each seed of both.

    At the training length all seeds count, for one that fails to train loses there; one that diverged has the metric
    of a guess. At others, those with which both passed the gate.
    """
    if factor == 1:
        guess = spec.chance(spec.length)
        ours, theirs = (_all_seeds(each, spec, variant, guess) for each in (cell, baseline))
        seeds = ours.keys() & theirs.keys()
    else:
        ours, theirs = (values_by_seed(each, spec, factor, variant) for each in (cell, baseline))
        seeds = set(passed_seeds(cell, spec)) & set(passed_seeds(baseline, spec))
        seeds &= ours.keys() & theirs.keys()
    return [_gain(ours[seed], theirs[seed], spec) for seed in sorted(seeds)]


def degradations(cell: Cell, spec: Any, factor: int, variant: str) -> dict[int, float]:
    """How much worse a seed that passed the gate is at a length than at that of training."""
    passed = passed_seeds(cell, spec)
    near, far = (values_by_seed(cell, spec, f, variant) for f in (1, factor))
    return {seed: _gain(near[seed], far[seed], spec) for seed in passed if seed in near and seed in far}


def _all_seeds(cell, spec, variant, guess):
    seeds = {row["seed"] for row in cell["rows"]}
    return dict.fromkeys(seeds, guess) | values_by_seed(cell, spec, 1, variant)


def _gain(ours: float, theirs: float, spec: Any) -> float:
    """The difference of the metric, of its logarithm where it is a ratio; positive where ours is better."""
    difference = math.log(ours / theirs) if spec.is_ratio else ours - theirs
    return difference if spec.higher_is_better else -difference


def sign_flip_p(differences: Sequence[float]) -> float:
    """The exact two-sided p-value of the mean, if each difference could as well have the other sign.

    With n pairs it is at least ``2^(1 - n)``: 0.25 for three seeds.

    >>> from attnorm.lengthbench.statistics import sign_flip_p
    >>> sign_flip_p([1.0, 2.0, 3.0])
    0.25
    """
    signs = np.array(list(itertools.product((-1, 1), repeat=len(differences))))
    sums = np.abs(signs @ np.asarray(differences))
    return float(np.mean(sums >= abs(np.sum(differences)) * (1 - 1e-9)))


def sign_test_p(num_better: int, num_worse: int) -> float:
    """The exact two-sided p-value of so many pairs in which one side is better; ties are left out.

    >>> from attnorm.lengthbench.statistics import sign_test_p
    >>> sign_test_p(num_better=4, num_worse=0)
    0.125
    """
    n, fewer = num_better + num_worse, min(num_better, num_worse)
    return min(1.0, 2 * sum(math.comb(n, k) for k in range(fewer + 1)) / 2**n)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's, with mean ranks for ties; None where one side is constant.

    >>> from attnorm.lengthbench.statistics import rank_correlation
    >>> rank_correlation([1, 2, 3], [30, 20, 10])
    -1.0
    """
    ranks = _ranks(x), _ranks(y)
    if any(np.ptp(own) == 0 for own in ranks):
        return None
    return round(float(np.corrcoef(*ranks)[0, 1]), 12)


def rank_correlation_p(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The two-sided p-value of :func:`rank_correlation`, by 20,000 random orders of y, the same for equal numbers.

    >>> from attnorm.lengthbench.statistics import rank_correlation_p
    >>> 0.01 < rank_correlation_p([1, 2, 3, 4, 5], [10, 20, 30, 40, 50]) < 0.03
    True
    """
    observed = rank_correlation(x, y)
    if observed is None:
        return None
    ours, theirs = _ranks(x), _ranks(y)
    orders = np.random.default_rng(0).permuted(np.tile(theirs, (20_000, 1)), axis=1)
    scale = np.std(ours) * np.std(theirs) * len(ours)
    correlations = (orders - theirs.mean()) @ (ours - ours.mean()) / scale
    more = np.sum(np.abs(correlations) >= abs(observed) - 1e-9)
    return float((more + 1) / (len(orders) + 1))


def diagnostic_median(cell: Cell, spec: Any, name: str, factor: int, variant: str) -> float | None:
    """Of a diagnostic, over the seeds that passed the gate."""
    passed = passed_seeds(cell, spec)
    values = [
        row[name]
        for row in cell["diagnostics"]
        if row["factor"] == factor
        and row["variant"] == variant
        and row["seed"] in passed
        and row[name] is not None
    ]
    return statistics.median(values) if values else None


def _is_mastered(value: float | None, spec: Any) -> bool:
    if value is None:
        return False
    return value >= spec.mastery if spec.higher_is_better else value <= spec.mastery


def _ranks(x: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(np.asarray(x), return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]
