"""Bounds on the distance, against all selections of all sizes, over random and adversarial rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm import theory

KEYS, DIMS = 8, 3
SLACK = 1 + 1e-10


def cases():
    """Weights (1600, 8) and vectors (1600, 8, 3); the last 400 rows are adversarial."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(1600, KEYS)) * rng.choice([0.0, 0.5, 3.0, 20.0], (1600, 1))
    p = rng.choice([1.0, 2.0, 4.0], (1600, 1))
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= np.sum(weights**p, -1, keepdims=True) ** (1 / p)
    x = rng.normal(size=(1600, KEYS, DIMS)) * rng.choice([0.1, 1.0, 10.0], (1600, 1, 1))
    x[400:800] /= np.linalg.norm(x[400:800], axis=-1, keepdims=True)
    x[1200:1300] = x[1200:1300, :1]  # identical
    x[1300:1400] = x[1300:1400, :1] * rng.choice([-1, 1], (100, KEYS, 1))  # on one line
    x[1400:1450, 1:] = 0
    largest = np.argmax(weights, -1)
    x[1450:1600] *= 1e-3  # long where the weight is large, short elsewhere; then the other way round
    x[np.arange(1450, 1550), largest[1450:1550]] *= 1e4
    weights[1550:1600] = 0
    weights[np.arange(1550, 1600), largest[1550:]] = 1
    return weights, x


def all_selections():
    """Masks (255, 8) of all non-empty selections."""
    return (np.arange(1, 2**KEYS)[:, None] >> np.arange(KEYS)) % 2 == 1


@functools.cache
def distances():
    """d̃ of every selection of every case, (255, 1600), in NumPy."""
    weights, x = cases()
    y = weights[..., None] * x
    return np.stack(
        [
            np.linalg.norm(y[:, mask].sum(1)[:, None] - y[:, ~mask], axis=-1).sum(-1)
            for mask in all_selections()
        ]
    )


@functools.partial(jax.jit)
@functools.partial(jax.vmap, in_axes=(0, 0, None))
def measured(weights, x, num_selected):
    selected = theory.top_keys(weights, num_selected)
    return {
        "selected": selected,
        "distance": theory.selection_distance(weights, x, selected),
        "vector": theory.selection_distance(weights, x, selected, aggregate="vector"),
        "proved": theory.proved_distance_bound(weights, x, selected),
        "paper": theory.paper_distance_bound(weights, x, selected),
        "expected": theory.proved_expected_distance_bounds(weights, x, num_selected),
        "ceiling": theory.proved_expected_distance_ceiling(weights, x, num_selected),
        "limit": theory.proved_expected_distance_limit(weights, x, KEYS - num_selected),
    }


@functools.cache
def results():
    """By number of selected keys."""
    with jax.enable_x64(True):
        weights, x = map(jnp.asarray, cases())
        return {N: jax.tree.map(np.asarray, measured(weights, x, N)) for N in range(1, KEYS + 1)}


@pytest.mark.parametrize("num_selected", range(1, KEYS + 1))
def test_distance_of_the_largest_weights_and_its_bound(num_selected):
    weights, x = cases()
    got = results()[num_selected]
    expected_mask = np.zeros_like(weights, bool)
    np.put_along_axis(expected_mask, np.argsort(-weights, -1, kind="stable")[:, :num_selected], True, -1)
    np.testing.assert_array_equal(got["selected"], expected_mask)
    index = (expected_mask @ (1 << np.arange(KEYS))) - 1
    expected = distances()[index, np.arange(len(weights))]
    scale = np.linalg.norm(weights[..., None] * x, axis=-1).sum(-1)
    np.testing.assert_array_less(np.abs(got["distance"] - expected), 1e-12 * scale + 1e-300)
    assert (got["distance"] <= got["proved"] * SLACK + 1e-12 * scale).all()
    y = weights[..., None] * x
    s = np.where(expected_mask[..., None], y, 0).sum(1)
    vector = np.linalg.norm(s - np.where(expected_mask[..., None], 0, y).sum(1), axis=-1)
    np.testing.assert_allclose(got["vector"], vector, atol=1e-12 * scale.max())


def test_identical_vectors_attain_the_bound():
    """All of d̃ is then the bracket."""
    for num_selected, got in results().items():
        if num_selected < KEYS:
            np.testing.assert_allclose(got["distance"][1200:1300], got["proved"][1200:1300], rtol=1e-10)


def test_the_form_with_a_square_root_fails():
    violations = np.mean([got["distance"] > got["paper"] * 1.01 for got in list(results().values())[1:-1]])
    assert violations > 0.3
    # The example of the docstring, in numbers of its own: 1000 identical vectors, 10 of them selected.
    weights, x = jnp.full(1000, 1e-3), jnp.ones((1000, 1))
    selected = jnp.arange(1000) < 10
    distance = float(theory.selection_distance(weights, x, selected))
    assert distance == pytest.approx(990 * 9 / 1000)
    assert distance > 2 * float(theory.paper_distance_bound(weights, x, selected))
    assert distance <= float(theory.proved_distance_bound(weights, x, selected)) * SLACK


def test_the_bound_is_false_for_arbitrary_sets():
    """Selecting the key without weight, of two equal ones: d̃ = 1 against a bound of -1."""
    weights, x = jnp.array([0.0, 1.0]), jnp.ones((2, 1))
    selected = jnp.array([True, False])
    assert float(theory.selection_distance(weights, x, selected)) == 1
    assert float(theory.proved_distance_bound(weights, x, selected)) == -1


@pytest.mark.parametrize("num_selected", range(1, KEYS + 1))
def test_expectation_over_all_sets_of_a_size(num_selected):
    weights, x = cases()
    got = results()[num_selected]
    sizes = all_selections().sum(-1)
    expected = distances()[sizes == num_selected].mean(0)
    scale = 1e-12 * np.linalg.norm(weights[..., None] * x, axis=-1).sum(-1)
    low, high = got["expected"]
    assert (low <= expected * SLACK + scale).all()
    assert (expected <= high * SLACK + scale).all()
    assert (expected <= got["ceiling"] * SLACK + scale).all()
    excluded = KEYS - num_selected
    error = excluded * (excluded + 1) / KEYS * np.linalg.norm(weights[..., None] * x, axis=-1).sum(-1)
    assert (np.abs(expected - got["limit"]) <= error * SLACK + scale).all()
    if num_selected == KEYS:
        assert not low.any() and not high.any() and not got["ceiling"].any()
    if num_selected == KEYS - 1:  # given the key outside, nothing is random
        np.testing.assert_allclose(low, high, rtol=1e-6, atol=scale.max())


@pytest.mark.parametrize("length", (1, 2))
def test_shortest_rows(length):
    weights, x = jnp.full(length, 1 / length), jnp.array([[1.0], [3.0]])[:length]
    low, high = theory.proved_expected_distance_bounds(weights, x, 1)
    expected = abs(0.5 - 1.5) if length == 2 else 0
    assert float(low) == pytest.approx(expected) and float(high) == pytest.approx(expected)


def test_few_excluded_keys_leave_the_length_of_the_whole_sum():
    """L - N = c fixed: the limit is c ‖Σ α x‖, not 0, with an error that falls like 1/L."""
    rng = np.random.default_rng(1)
    for L in (64, 1024):
        weights = jnp.asarray(rng.dirichlet(np.ones(L)))
        x = jnp.asarray(rng.normal(size=(L, 4)) + 1)
        limit = float(theory.proved_expected_distance_limit(weights, x, 3))
        low, high = theory.proved_expected_distance_bounds(weights, x, L - 3)
        error = 3 * 4 / L * float(jnp.sum(weights * jnp.linalg.norm(x, axis=-1)))
        assert limit > 1 and float(low) - error <= limit <= float(high) + error


def test_expectation_grows_with_length_under_l2_and_not_under_softmax():
    """Identical vectors, N = 5: d̃ = (L - N)(N - 1) w for the uniform weight w, 1/L or 1/sqrt(L)."""
    for power, wanted in ((1.0, [3.8, 3.98, 3.998]), (0.5, [38.0, 125.9, 399.8])):
        got = []
        for L in (100, 1000, 10000):
            low, high = theory.proved_expected_distance_bounds(jnp.full(L, L**-power), jnp.ones((L, 1)), 5)
            assert float(low) == pytest.approx(float(high), rel=1e-6)
            got.append(float(low))
        assert got == pytest.approx(wanted, rel=1e-3)


def test_arguments_outside_their_range_are_named():
    weights, x = jnp.full(3, 1 / 3), jnp.ones((3, 1))
    for function in (theory.proved_expected_distance_bounds, theory.proved_expected_distance_ceiling):
        for N in (0, 4):
            with pytest.raises(ValueError, match=f"^num_selected must be from 1 to 3.*got {N}"):
                function(weights, x, N)
    with pytest.raises(ValueError, match="^num_selected must be"):
        theory.top_keys(weights, 4)
    with pytest.raises(ValueError, match="^aggregate must be"):
        theory.selection_distance(weights, x, weights > 0, aggregate="sum")
