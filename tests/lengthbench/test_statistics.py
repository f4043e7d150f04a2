"""The gate, and p-values against enumeration."""

import itertools
import math
from types import SimpleNamespace

import numpy as np
import pytest

from attnorm.lengthbench.statistics import (
    Range,
    degradations,
    paired_gains,
    passed_seeds,
    range_of,
    rank_correlation,
    rank_correlation_p,
    sign_flip_p,
    sign_test_p,
)

ACCURACY = SimpleNamespace(
    metric="accuracy",
    mastery=0.9,
    higher_is_better=True,
    is_ratio=False,
    length=8,
    chance=lambda length: 0.125,
)
ERROR = SimpleNamespace(metric="error", mastery=0.1, higher_is_better=False, is_ratio=False)
RATIO = SimpleNamespace(metric="error", mastery=0.1, higher_is_better=False, is_ratio=True)


def make_cell(metric, near, far):
    return {
        "rows": [
            {"seed": seed, "factor": factor, "variant": "", metric: value}
            for factor, values in ((1, near), (4, far))
            for seed, value in enumerate(values)
        ]
    }


def test_only_seeds_that_passed_the_gate_are_read():
    cell = make_cell("accuracy", [0.95, 0.2, 1.0, None], [0.5, 0.9, 0.7, 0.8])
    assert passed_seeds(cell, ACCURACY) == [0, 2]
    assert range_of(cell, ACCURACY, 4, "") == Range(0.6, 0.5, 0.7, num_passed=2, num_seeds=4)
    assert range_of(cell, ACCURACY, 1, "", gated=False) == Range(0.95, 0.2, 1.0, num_passed=2, num_seeds=4)
    none = make_cell("accuracy", [0.5, 0.5], [1.0, 1.0])
    assert range_of(none, ACCURACY, 4, "") == Range(None, None, None, num_passed=0, num_seeds=2)


def test_gains_are_of_seeds_that_passed_in_both_cells():
    ours = make_cell("accuracy", [0.95, 0.2, 1.0], [0.5, 0.9, 0.7])
    theirs = make_cell("accuracy", [1.0, 1.0, 1.0], [0.4, 0.4, 0.9])
    assert paired_gains(ours, theirs, ACCURACY, 4, "") == pytest.approx([0.1, -0.2])
    ours, theirs = make_cell("error", [0.01], [0.2]), make_cell("error", [0.05], [0.8])
    assert paired_gains(ours, theirs, RATIO, 4, "") == pytest.approx([math.log(4)])
    assert paired_gains(ours, theirs, ERROR, 4, "") == pytest.approx([0.6])


def test_at_the_training_length_a_seed_that_fails_loses():
    ours = make_cell("accuracy", [0.95, 0.2, None], [0.5, 0.9, 0.7])
    theirs = make_cell("accuracy", [0.9, 1.0, 0.625], [0.4, 0.4, 0.9])
    assert paired_gains(ours, theirs, ACCURACY, 1, "") == pytest.approx([0.05, -0.8, 0.125 - 0.625])


def test_losses_are_from_the_training_length_on():
    assert degradations(make_cell("accuracy", [0.95, 0.2], [0.5, 0.1]), ACCURACY, 4, "") == {
        0: pytest.approx(0.45)
    }
    cell = make_cell("error", [0.05], [0.5])
    assert degradations(cell, RATIO, 4, "") == {0: pytest.approx(math.log(10))}
    assert degradations(cell, ERROR, 4, "") == {0: pytest.approx(0.45)}


@pytest.mark.parametrize("differences", [[0.5, -0.2, 0.9], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0]])
def test_sign_flips_are_enumerated(differences):
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
            for signs in itertools.product((1, -1), repeat=len(differences))]  # fmt: skip
    wanted = sum(s >= abs(sum(differences)) - 1e-12 for s in sums) / len(sums)
    assert sign_flip_p(differences) == wanted


def test_sign_test_is_the_binomial_tail():
    outcomes = [sum(signs) for signs in itertools.product((0, 1), repeat=9)]
    assert sign_test_p(7, 2) == pytest.approx(np.mean([heads >= 7 or heads <= 2 for heads in outcomes]))
    assert sign_test_p(3, 3) == 1 and sign_test_p(0, 0) == 1


def test_rank_correlation_shares_ranks_among_ties():
    # Ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4.
    wanted = np.corrcoef([1, 2.5, 2.5, 4], [1, 2, 3, 4])[0, 1]
    assert rank_correlation([5, 7, 7, 100], [-1, 0, 2, 3]) == pytest.approx(wanted)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_correlations_have_the_p_value_of_all_orders():
    x, y = [1, 2, 3, 4, 5], [2, 1, 4, 3, 5]
    rho = rank_correlation(x, y)
    orders = [abs(rank_correlation(x, order)) >= rho - 1e-9 for order in itertools.permutations(y)]
    assert rank_correlation_p(x, y) == pytest.approx(np.mean(orders), abs=0.015)
    assert rank_correlation_p([1, 1, 1], [1, 2, 3]) is None
