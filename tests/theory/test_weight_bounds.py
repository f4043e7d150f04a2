"""Bounds on weights of bounded logits: over random and extreme rows, in NumPy from the definitions."""

import math

import numpy as np
import pytest

from attnorm import general, lp, softmax, sparsemax, ssmax, theory

KEYS = 40
POWERS = (0.5, 1.0, 1.5, 2.0, 4.0, math.inf)
SLACK = 1 + 1e-12


def rows(lowest, highest):
    """Values of a positive F: 1000 random rows, and rows that take both extremes in every proportion."""
    rng = np.random.default_rng(0)
    uniform = rng.uniform(lowest, highest, (500, KEYS))
    powers = lowest + (highest - lowest) * rng.uniform(size=(500, KEYS)) ** rng.choice([0.05, 20], (500, 1))
    two_levels = np.where(np.arange(KEYS) < np.arange(KEYS + 1)[:, None], highest, lowest)
    return np.concatenate([uniform, powers, two_levels])


def normalized(values, p):
    return values / np.linalg.norm(values, p, axis=-1, keepdims=True) if p >= 1 else _normalized(values, p)


def _normalized(values, p):
    return values / np.sum(values**p, -1, keepdims=True) ** (1 / p)


@pytest.mark.parametrize("p", POWERS)
def test_weights_of_any_positive_function(p):
    y = normalized(rows(0.5, 3.0), p)
    low, high = theory.proved_weight_bounds(KEYS, 6.0, p=p)
    assert low <= y.min() * SLACK and y.max() <= high * SLACK
    # One key against all others comes within the 1/L that it itself adds to the norm.
    extreme = normalized(np.where(np.arange(KEYS) < 1, 3.0, 0.5)[None], p).max()
    assert (
        extreme >= high / 6.0 if p == math.inf else extreme >= high / (1 + 6.0**p / KEYS) ** (1 / p) / SLACK
    )


@pytest.mark.parametrize("p", POWERS)
def test_the_librarys_weights_of_bounded_logits(p):
    """Random logits in [-Δ, Δ], and those at either end in every proportion."""
    largest, temperature = 1.3, 0.7
    y = np.asarray(lp(rows(-largest, largest) / temperature, p=p))
    ratio = math.exp(2 * largest / temperature)
    low, high = theory.proved_weight_bounds(KEYS, ratio, p=p)
    assert low <= y.min() * SLACK and y.max() <= high * SLACK
    # The extremes are attained up to the part of the norm that the key itself has.
    uniform = KEYS ** (-1 / p)
    part = 1.0 if p == math.inf else (1 - 1 / KEYS + ratio**-p / KEYS) ** (-1 / p)
    assert y.min() == pytest.approx(low * part, rel=1e-12)
    part = 1 / ratio if p == math.inf else (1 - 1 / KEYS + ratio**p / KEYS) ** (-1 / p)
    assert y.max() == pytest.approx(high * part, rel=1e-12)
    assert theory.proved_weight_bounds(KEYS, 1.0, p=p) == (uniform, uniform)


def test_functions_that_escape_the_bound():
    """Lemma 1 needs an F that is positive and the same at every length: without either a key stays selected."""
    escaping = {
        "ssmax": lambda s: ssmax(s, h=1.0),  # F = exp(s log L)
        "sparsemax": sparsemax,  # 0 below a threshold
        "relu": lambda s: general(s, F="relu"),
    }
    for L in (100, 10_000):
        s = np.where(np.arange(L) == 7, 1.0, -1.0)
        low, high = theory.proved_weight_bounds(L, math.exp(2))  # of exp on [-1, 1]
        y = np.asarray(softmax(s))
        assert low <= y.min() * SLACK and y.max() <= high * SLACK
        for name, function in escaping.items():
            y = np.asarray(function(s))
            assert y.sum() == pytest.approx(1, rel=1e-9), name
            assert y[7] > 0.98 > 10 * high and y.min() < low / 10, (name, L)


@pytest.mark.parametrize("temperature", (0.5, 4.0))
def test_softmax_weights_and_entropy(temperature):
    query = np.random.default_rng(1).normal(size=8)
    keys = np.random.default_rng(2).normal(size=(1000, KEYS, 8))
    keys[500:] *= np.random.default_rng(3).uniform(0, 2, (500, 1, 1))
    keys[-KEYS:, :, :] = query  # parallel, in every proportion with antiparallel ones: the bound's extremes
    keys[-KEYS:] *= np.where(np.arange(KEYS) < np.arange(KEYS)[:, None], 1, -1)[..., None]
    for row in keys[:: len(keys) // 4]:
        expected = np.linalg.norm(query) * np.linalg.norm(row, axis=-1).max()
        assert float(theory.logit_bound(query, row)) == pytest.approx(expected, rel=1e-12)
    largest = np.linalg.norm(query) * np.linalg.norm(keys, axis=-1).max(-1)
    s = keys @ query / temperature
    a = np.exp(s - s.max(-1, keepdims=True))
    a /= a.sum(-1, keepdims=True)
    entropy = -np.sum(a * np.log(np.where(a > 0, a, 1)), -1)
    for bound, weights, h in zip(largest, a, entropy, strict=True):
        low, high = theory.paper_softmax_weight_bounds(KEYS, bound, temperature=temperature)
        assert low <= weights.min() * SLACK and weights.max() <= high * SLACK
        low, high = theory.proved_entropy_bounds(KEYS, bound, temperature=temperature)
        assert low <= h + 1e-12 and h <= high + 1e-12
    cold = theory.paper_softmax_weight_bounds(KEYS, 1.0, temperature=1e-3)
    assert [float(bound) for bound in cold] == [0, math.inf]


def test_effective_keys_and_where_their_bound_is_attained():
    ratio = 4.0
    values = rows(1.0, ratio)
    effective = values.sum(-1) ** 2 / (values**2).sum(-1)
    low, high = theory.proved_effective_keys_bounds(KEYS, ratio)
    assert low <= effective.min() * SLACK and effective.max() <= high * SLACK
    assert effective.min() == pytest.approx(
        low, rel=1e-12
    )  # 8 = KEYS / (1 + ratio) keys with the largest value


@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("order", (1.0, 2.0, 3.0))
def test_norms_and_the_factor_to_softmax(p, order):
    values = np.concatenate([rows(1e-3, 1.0), np.eye(KEYS)[:1], np.ones((1, KEYS))])
    y, a = normalized(values, p), normalized(values, 1.0)
    norms = np.linalg.norm(y, order, axis=-1)
    low, high = theory.proved_norm_bounds(KEYS, p=p, order=order)
    assert low <= norms.min() * SLACK and norms.max() <= high * SLACK
    assert sorted([norms[-2], norms[-1]]) == pytest.approx([low, high], rel=1e-12)  # one-hot and uniform
    factors = y[:, 0][values[:, 0] > 0] / a[:, 0][values[:, 0] > 0]
    low, high = theory.proved_factor_bounds(KEYS, p=p)
    assert low <= factors.min() * SLACK and factors.max() <= high * SLACK


def test_only_two_has_a_norm_without_length():
    lengths = (10, 1000, 100000)
    assert [theory.proved_norm_bounds(L, p=2) for L in lengths] == [(1, 1)] * 3
    for p in (1.0, 1.9, 2.1, math.inf):
        low, high = zip(*(theory.proved_norm_bounds(L, p=p) for L in lengths), strict=True)
        assert len(set(low)) == 3 or len(set(high)) == 3


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: theory.proved_weight_bounds(0, 2.0), "num_keys"),
        (lambda: theory.proved_weight_bounds(3, 0.5), "ratio"),
        (lambda: theory.proved_weight_bounds(3, 2.0, p=0), "p"),
        (lambda: theory.paper_softmax_weight_bounds(0, 1.0), "num_keys"),
        (lambda: theory.paper_softmax_weight_bounds(3, math.inf), "max_abs_logit"),
        (lambda: theory.proved_effective_keys_bounds(3, math.inf), "ratio"),
        (lambda: theory.proved_norm_bounds(3, p=1, order=-1), "order"),
        (lambda: theory.proved_factor_bounds(3, p=math.nan), "p"),
        (lambda: theory.proved_entropy_bounds(3, -1.0), "max_abs_logit"),
        (lambda: theory.paper_softmax_weight_bounds(3, 1.0, temperature=0), "temperature"),
    ],
)
def test_arguments_outside_their_range_are_named(call, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        call()
