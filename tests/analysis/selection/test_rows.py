"""The measurements of many rows at once, against the definitions of attnorm.theory row by row."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm import get_normalizer, theory
from attnorm.analysis.selection.gradients import gradient_rows
from attnorm.analysis.selection.rows import (
    distance_rows,
    evenly_spaced,
    random_ranks,
    rows_of,
    separability_rows,
    vectors_of,
)
from attnorm.analysis.sources import attentions
from tests.analysis.selection.heads import Given

HEADS, KEYS, DIMS = 3, 7, 3
NUMS = (1, 2, 5)


def given(is_causal):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(HEADS, KEYS, KEYS)) * np.array([0.0, 1.0, 4.0])[:, None, None]
    logits[2, :, 0] += 6  # a head with a sink
    values = rng.normal(size=(HEADS, KEYS, 2))
    (attention,) = attentions(
        Given(logits, rng.normal(size=(KEYS, DIMS)), values, is_causal), np.arange(KEYS)
    )
    return attention


@functools.cache
def measured(is_causal, name, vectors, hidden="left_out", num_draws=1):
    attention = given(is_causal)
    x = vectors_of(attention, vectors, unit=False)
    rows = rows_of(attention, x, 0, hidden)
    got = distance_rows(
        get_normalizer(name), rows, random_ranks(rows.counted, num_draws, 0), num_selected=NUMS
    )
    return attention, np.asarray(x), {key: np.asarray(value) for key, value in got.items()}


def every_row(attention, x, name, hidden="left_out"):
    """Head, row, its weights and vectors, of the keys that count."""
    for head, row in itertools.product(range(HEADS), range(KEYS)):
        seen = np.arange(KEYS) <= row if attention.is_causal else np.ones(KEYS, bool)
        weights = np.zeros(KEYS)
        s = np.asarray(attention.logits, np.float64)[head, row, seen]
        weights[seen] = np.exp(s - s.max()) / np.linalg.norm(
            np.exp(s - s.max()), 1 if name == "softmax" else 2
        )
        keep = seen if hidden == "left_out" else np.ones(KEYS, bool)
        yield head, row, weights[keep], np.asarray(x[head if len(x) > 1 else 0], np.float64)[keep]


@pytest.mark.parametrize(
    ("is_causal", "name", "vectors", "hidden"),
    [
        (False, "softmax", "embedding", "left_out"),
        (True, "l2", "values", "left_out"),
        (True, "softmax", "embedding", "counted"),
    ],
)
def test_distances_and_bounds(is_causal, name, vectors, hidden):
    attention, x, got = measured(is_causal, name, vectors, hidden)
    compared = 0
    with jax.enable_x64(True):
        for head, row, weights, x_row in every_row(attention, x, name, hidden):
            y = weights[:, None] * x_row
            for k, N in enumerate(NUMS):
                if N >= len(weights):
                    assert all(got[key][head, row, k] == 0 for key in got if key != "expected"), (row, N)
                    continue
                chosen = np.argsort(-weights, kind="stable")[:N]
                outside = np.setdiff1d(np.arange(len(weights)), chosen)
                distance = np.linalg.norm(y[chosen].sum(0) - y[outside], axis=-1).sum()
                assert got["distance"][head, row, k] == pytest.approx(distance, rel=2e-3, abs=1e-3)
                if row % 3 == 0 and N == 2:  # each shape of row is compiled anew
                    selected = np.isin(np.arange(len(weights)), chosen)
                    bound = theory.proved_distance_bound(weights, x_row, selected)
                    low, high = theory.proved_expected_distance_bounds(weights, x_row, N)
                    ceiling = theory.proved_expected_distance_ceiling(weights, x_row, N)
                    for key, value in (
                        ("bound", bound),
                        ("expected_low", low),
                        ("expected_high", high),
                        ("expected_ceiling", ceiling),
                    ):
                        assert got[key][head, row, k] == pytest.approx(float(value), rel=2e-3, abs=1e-3), key
                    compared += 1
    assert compared >= 3


def test_expected_distance_is_the_mean_over_all_selections():
    """Exact enumeration against sampled selections; also under a sink that few selections hold."""
    attention, x, got = measured(False, "softmax", "embedding", num_draws=400)
    for k, N in enumerate(NUMS):
        exact = np.zeros((HEADS, KEYS))
        for head, row, weights, x_row in every_row(attention, x, "softmax"):
            y = weights[:, None] * x_row
            exact[head, row] = np.mean(
                [
                    np.linalg.norm(y[list(inside)].sum(0) - np.delete(y, list(inside), axis=0), axis=-1).sum()
                    for inside in itertools.combinations(range(KEYS), N)
                ]
            )
        np.testing.assert_allclose(got["expected"][..., k], exact, rtol=0.05)
        np.testing.assert_allclose(got["expected"][..., k].mean(1), exact.mean(1), rtol=0.02)


def test_norm_of_the_sum():
    attention, x, _ = measured(False, "softmax", "embedding")
    rows = rows_of(attention, jnp.asarray(x), 0, "left_out")
    got = distance_rows(
        get_normalizer("softmax"),
        rows,
        random_ranks(rows.counted, 1, 0),
        num_selected=NUMS,
        aggregate="vector",
        with_bounds=False,
    )
    for head, row, weights, x_row in every_row(attention, x, "softmax"):
        y = weights[:, None] * x_row
        chosen = np.argsort(-weights, kind="stable")[:2]
        expected = np.linalg.norm(2 * y[chosen].sum(0) - y.sum(0))
        assert float(got["distance"][head, row, 1]) == pytest.approx(expected, rel=2e-3, abs=1e-3)


def test_separability():
    attention = given(is_causal=True)
    x = vectors_of(attention, "embedding", unit=True)
    np.testing.assert_allclose(np.linalg.norm(x, axis=-1), 1, rtol=1e-6)
    rows = rows_of(attention, x, 0, "left_out")
    thresholds = jnp.array([0.01, 0.3])
    got = separability_rows(
        get_normalizer("softmax"),
        rows,
        jnp.float32(1),
        jnp.float32(0.1),
        thresholds,
        num_selected=NUMS,
        num_dims=DIMS,
    )
    got = {key: np.asarray(value) for key, value in got.items()}
    for head, row, weights, x_row in every_row(attention, np.asarray(x), "softmax"):
        y = weights[:, None] * x_row
        for k, N in enumerate(NUMS):
            if N >= len(weights):
                assert got["recall"][head, row, k] == 1
                continue
            order = np.argsort(-weights, kind="stable")
            D = np.linalg.norm(y - y[order[:N]].sum(0), axis=-1)
            inside, outside = D[order[:N]], D[order[N:]]
            gaps = np.abs(inside[:, None] - outside)
            if gaps.min() < 1e-3:
                continue  # float32 may order them either way
            recall = np.mean(inside < outside.min())
            precision = N / (N + np.sum(outside <= inside.max()))
            assert got["recall"][head, row, k] == pytest.approx(recall)
            assert got["precision"][head, row, k] == pytest.approx(precision)
            assert got["f"][head, row, k] == pytest.approx(2 * recall * precision / (recall + precision))
            top = weights[order[:N]]
            ceiling = np.asarray(theory.proved_distance_ceiling(top, radius=1.0, min_distance=0.1))
            low = max(1 - ceiling.mean() / outside.min(), 0)
            floor = theory.proved_mean_distance_floor(top, radius=1.0, num_dims=DIMS)
            high = [
                float(theory.proved_separability_upper_bound(top, floor, radius=1.0, threshold=t))
                + (outside.min() > t)
                for t in (0.01, 0.3)
            ]
            assert got["low"][head, row, k] == pytest.approx(low, abs=0.02)
            assert low <= recall + 1e-9
            assert got["high"][head, row, k] == pytest.approx(high, rel=1e-3)


@pytest.mark.parametrize("vectors", ("embedding", "values"))
def test_keys_that_repeat_are_ties_whatever_rounding_says(vectors):
    """Every key stands twice: at odd N the twin of a selected one is outside, and as near."""
    rng = np.random.default_rng(0)
    logits = np.repeat(rng.normal(size=(8, 32, 16)), 2, axis=-1)
    x, values = (
        np.repeat(values, 2, axis=-2) for values in (rng.normal(size=(16, 5)), rng.normal(size=(8, 16, 5)))
    )
    (attention,) = attentions(Given(logits, x, values), np.arange(32))
    x = vectors_of(attention, vectors, unit=vectors == "embedding")
    nums = (1, 3, 5)
    got = separability_rows(
        get_normalizer("softmax"),
        rows_of(attention, x, 0, "left_out"),
        jnp.max(jnp.linalg.norm(x, axis=-1)),
        jnp.float32(0),
        jnp.array([0.1]),
        num_selected=nums,
        num_dims=5,
    )
    got = {key: np.asarray(value) for key, value in got.items()}
    # N = 1: D is 0 for the key and for its twin.
    for key, wanted in (("recall", 0), ("low", 0), ("precision", 0.5), ("f", 0)):
        np.testing.assert_array_equal(got[key][..., 0], wanted, err_msg=key)
    assert (got["low"] <= got["recall"] + 1e-6).all()
    compared = 0
    logits, x = np.asarray(attention.logits, np.float64), np.asarray(x, np.float64)
    for head, row, (k, N) in itertools.product(range(8), range(32), enumerate(nums)):
        weights = np.exp(logits[head, row]) / np.exp(logits[head, row]).sum()
        y = weights[:, None] * x[head if len(x) > 1 else 0]
        order = np.argsort(-weights, kind="stable")
        D = np.linalg.norm(y - y[order[:N]].sum(0), axis=-1)
        inside, outside = D[order[:N]], D[order[N:]]
        gaps = np.abs(inside[:, None] - outside)
        if ((gaps > 1e-9) & (gaps < 1e-4)).any():
            continue  # neither a tie nor told apart in float32
        assert got["recall"][head, row, k] == pytest.approx(np.mean(inside < outside.min() - 1e-9))
        precision = N / (N + np.sum(outside <= inside.max() + 1e-9))
        assert got["precision"][head, row, k] == pytest.approx(precision)
        compared += 1
    assert compared > 700


@pytest.mark.parametrize("name", ("softmax", "l2"))
def test_gradients(name):
    p = {"softmax": 1, "l2": 2}[name]
    rng = np.random.default_rng(1)
    products = rng.normal(size=(2, 2, 6)).astype(np.float32)
    visible = np.arange(6) <= np.array([3, 5])[:, None]
    temperatures, steps = (0.2, 1.0), (1e-4, 20.0)
    got = gradient_rows(
        get_normalizer(name),
        products,
        jnp.asarray(visible),
        jnp.array([3, 5]),
        temperatures=temperatures,
        steps=steps,
        seed=0,
    )
    with jax.enable_x64(True):
        for head, row, q in itertools.product(range(2), range(2), range(2)):
            s = products[head, row, visible[row]].astype(np.float64) / temperatures[q]
            y = np.exp(s) / np.linalg.norm(np.exp(s), p)
            J = np.asarray(theory.jacobian(y, p)) / temperatures[q]
            at = (head, row, q)
            assert got["spectral"][at] == pytest.approx(np.linalg.norm(J, 2), rel=1e-2)
            frobenius = np.linalg.norm(J) / np.sqrt(visible[row].sum())
            assert 0.3 * frobenius <= got["mean_response"][at] <= 2.5 * frobenius
            assert got["mean_response"][at] <= np.linalg.norm(J, 2) * (1 + 1e-9)
            assert got["difference"][*at, 0] <= np.linalg.norm(J, 2) * 1.001
            assert 1 <= got["direction_keys"][at] <= visible[row].sum() + 1e-9
            bound = theory.proved_finite_difference_bound(6, p=p, temperature=temperatures[q], step=20.0)
            assert 0 < got["difference"][*at, 1] <= float(bound)


def test_evenly_spaced_rows_end_with_the_last():
    for count, most in ((10, 3), (7, 7), (5, 9), (1000, 256), (4, 0)):
        chosen = evenly_spaced(count, most)
        assert chosen[-1] == count - 1 and len(set(chosen)) == min(count, most or count)
        assert set(np.diff(chosen)) <= {count // len(chosen), count // len(chosen) + 1}


def test_random_ranks_are_permutations_of_the_counted_keys():
    counted = np.arange(5) <= np.arange(5)[:, None]
    ranks = random_ranks(counted, 50, 3)
    for row in range(5):
        assert (np.sort(ranks[:, row, : row + 1], -1) == np.arange(row + 1)).all()
    assert len({tuple(x) for x in ranks[:, 4]}) > 20
