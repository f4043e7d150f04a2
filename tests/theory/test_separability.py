"""Bounds on the separable fraction. On a line (d = 1) every expectation is an exact sum over all signs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm import lp, theory

KEYS = 9
SIGNS = np.where((np.arange(2**KEYS)[:, None] >> np.arange(KEYS)) % 2 == 1, 1.0, -1.0)
SLACK = 1e-12


def retrieve(weights, x, selected):
    """N_s / N, precision and F in NumPy, from their definitions; x is (S, D)."""
    y = weights[:, None] * x
    D = np.linalg.norm(y - y[selected].sum(0), axis=-1)
    inside, outside = D[selected], D[~selected]
    recall = np.mean(inside < outside.min()) if outside.size else 1.0
    precision = inside.size / (inside.size + np.sum(outside <= inside.max()))
    return precision, recall, 2 * precision * recall / (precision + recall)


@functools.cache
def line_cases():
    """Weights (1000, 9) with N = 3 selected first, and over all 2^9 signs: D, r and N_s/N."""
    rng = np.random.default_rng(0)
    weights = np.sort(rng.dirichlet(np.ones(KEYS), 1000), -1)[:, ::-1]
    weights[500:] = np.sort(rng.choice([0.05, 0.1, 0.2], (500, KEYS)), -1)[:, ::-1]
    weights[900:] = np.where(np.arange(KEYS) < 3, 0.2, 0.2 - 1e-9)  # the rest just below
    y = weights[:, None] * SIGNS  # case, signs, key
    D = np.abs(y - y[..., :3].sum(-1, keepdims=True))
    r = D[..., 3:].min(-1)
    return weights, D, r, (D[..., :3] < r[..., None]).mean(-1)


def test_retrieval_follows_its_definition():
    rng = np.random.default_rng(1)
    weights, x = rng.dirichlet(np.ones(10), 300), rng.normal(size=(300, 10, 2))
    x[250:] = x[250:, :1]  # ties everywhere
    selected = rng.uniform(size=(300, 10)) < rng.uniform(size=(300, 1))
    selected[:, 0] = True
    selected[0] = True
    got = jax.jit(jax.vmap(theory.retrieval))(weights, x, selected)
    wanted = np.array([retrieve(*case) for case in zip(weights, x, selected, strict=True)]).T
    np.testing.assert_allclose(np.array(got), wanted, rtol=1e-12)
    assert float(theory.separable_fraction(weights[1], x[1], selected[1])) == wanted[1, 1]


def test_the_ceiling_holds_for_every_placement():
    """1000 random placements, and all at one point, where it is attained."""
    rng = np.random.default_rng(2)
    weights = rng.dirichlet(np.ones(6), 1000) * rng.choice([1.0, 3.0], (1000, 1))
    x = rng.normal(size=(1000, 6, 3))
    x[900:] = x[900:, :1]
    x *= 2.5 / np.linalg.norm(x, axis=-1, keepdims=True)
    pairs = np.linalg.norm(x[:, :, None] - x[:, None], axis=-1)
    apart = np.where(np.eye(6) == 1, np.inf, pairs).min((1, 2))
    ceiling = jax.jit(jax.vmap(lambda w, d: theory.proved_distance_ceiling(w, radius=2.5, min_distance=d)))(
        weights, apart
    )
    y = weights[..., None] * x
    D = np.linalg.norm(y.sum(1, keepdims=True) - y, axis=-1)
    assert (D <= ceiling * (1 + SLACK)).all()
    np.testing.assert_allclose(D[900:], ceiling[900:], rtol=1e-10)


def test_lower_side_of_the_paper_holds_for_every_draw():
    weights, _, r, fraction = line_cases()
    r = np.maximum(r, 1e-12)  # no key lies within a ball of radius 0, and the bound is far below 0
    low = jax.jit(
        jax.vmap(
            jax.vmap(
                lambda w, t: theory.paper_separability_bounds(w, radius=1.0, min_distance=0.0, threshold=t)[
                    0
                ],
                (None, 0),
            )
        )
    )(weights[:, :3], r)
    assert (low <= fraction + 1e-9).all()
    assert (np.asarray(low) > 0.2).any(), "every bound is vacuous, so the case shows nothing"


def test_upper_side_of_the_paper_fails():
    """On a line, exact expectations for a fixed ball exceed the paper's form."""
    weights, D, _, _ = line_cases()
    form = jax.jit(
        jax.vmap(
            lambda w, t: theory.paper_separability_bounds(w, radius=1.0, min_distance=0.0, threshold=t)[1]
        )
    )
    thresholds = np.linspace(0.05, 1, 20)
    fixed = np.stack([(D[..., :3] < t).mean((1, 2)) for t in thresholds])
    forms = np.stack([form(weights[:, :3], np.full(1000, t)) for t in thresholds])
    assert np.mean(fixed > forms + 0.01) > 0.1
    # Two equal weights always lie within the ball of radius 1, and the form says 0.88.
    selected = jnp.array([True, True, False])
    x = jnp.array([[1.0], [1.0], [-1.0]])
    weights = jnp.array([0.5, 0.5, 0.0])
    assert float(theory.separable_fraction(weights, x, selected)) == 1
    _, high = theory.paper_separability_bounds(weights[:2], radius=1.0, min_distance=0.0, threshold=1.0)
    assert float(high) == pytest.approx(np.exp(-1 / 8))


@pytest.mark.parametrize("independent", (True, False))
def test_proved_upper_bound_holds_at_every_threshold(independent):
    weights, D, r, fraction = line_cases()
    mean = D[..., :3].mean(1)
    expected = fraction.mean(-1)
    bound = jax.jit(
        jax.vmap(
            lambda w, mu, t, tail: theory.proved_separability_upper_bound(
                w, mu, radius=1.0, threshold=t, exceeding=tail, independent=independent
            )
        )
    )
    tightest = np.full(len(weights), np.inf)
    for t in 1e-6 + np.linspace(0, 0.6, 13):
        got = np.asarray(bound(weights[:, :3], mean, np.full(1000, t), np.mean(r > t, -1)))
        assert (expected <= got + SLACK).all()
        tightest = np.minimum(tightest, got)
        # For a fixed ball the tail is not needed.
        fixed = (D[..., :3] < t).mean((1, 2))
        assert (
            fixed <= np.asarray(bound(weights[:, :3], mean, np.full(1000, t), np.zeros(1000))) + SLACK
        ).all()
    assert (tightest < 0.95).mean() > 0.05, "the bound is vacuous everywhere, so the case shows nothing"


def test_the_radius_of_the_draw_must_not_be_the_threshold():
    """d = 1, three equal weights, twelve others just below: exactly 3/4 against 0.705."""
    N, L, w = 3, 15, 1 / 3
    signs = np.where((np.arange(2**L)[:, None] >> np.arange(L)) % 2 == 1, 1.0, -1.0)
    weights = np.where(np.arange(L) < N, w, w - 1e-9)
    y = weights * signs
    D = np.abs(y - y[:, :N].sum(-1, keepdims=True))
    r = D[:, N:].min(-1)
    fraction = (D[:, :N] < r[:, None]).mean()
    mean = D[:, :N].mean(0)
    assert fraction == pytest.approx(0.75, abs=1e-3)
    naive, proved = np.inf, np.inf
    bound = functools.partial(
        theory.proved_separability_upper_bound, jnp.full(N, w), mean, radius=1.0, independent=False
    )
    thresholds, counts = np.unique(r.round(6), return_counts=True)
    naive = sum(c * float(bound(threshold=t)) for t, c in zip(thresholds, counts, strict=True)) / len(r)
    assert naive == pytest.approx(0.705, abs=1e-3)
    assert naive < fraction
    proved = min(float(bound(threshold=t, exceeding=np.mean(r > t))) for t in np.linspace(0, 1, 21))
    assert fraction <= proved


def test_mean_distance_floor_on_a_line():
    """Exactly, for 1000 weights."""
    weights, D, _, _ = line_cases()
    floor = jax.jit(jax.vmap(lambda w: theory.proved_mean_distance_floor(w, radius=1.0, num_dims=1)))
    floors, means = floor(weights[:, :3]), D[..., :3].mean(1)
    assert (floors <= means + SLACK).all()
    assert float((floors / means).max()) > 0.7


def spread_weights():
    """Weights (1026, 5): from even to nearly one-hot, one-hot, equal for some keys and 0 or tiny for the others."""
    rng = np.random.default_rng(3)
    random = [rng.dirichlet(np.full(5, concentration), 500) for concentration in (0.1, 3.0)]
    equal = np.tri(5) / np.arange(1, 6)[:, None]
    few = [equal, equal[:, ::-1], equal + 1e-9]
    steps = [base ** -np.arange(5.0) for base in (1.1, 1.5, 2, 3, 5, 8, 20, 50, 100, 1000, 1e6)]
    return np.concatenate([*random, *few, steps])


@jax.jit
def floor_and_distances(weights, x, num_dims):
    """Of each row of weights: the floor for radius 2, and from draws of x the mean of D, its error and that of D²."""
    products = jnp.einsum("njd,nkd->njk", x, x)

    def of(row):
        others = row * (1 - jnp.eye(5))
        squares = jnp.einsum("ij,njk,ik->ni", others, products, others)
        D = jnp.sqrt(jnp.maximum(squares, 0))
        floor = theory.proved_mean_distance_floor(row, radius=2.0, num_dims=num_dims)
        return floor, D.mean(0), D.std(0) / jnp.sqrt(len(x)), squares.mean(0)

    return jax.lax.map(of, weights)


@pytest.mark.parametrize("num_dims", (2, 3, 16))
def test_mean_distance_floor(num_dims):
    """Over 1000 weights; vectors of fewer dimensions are padded with zeros, so that one program serves all."""
    weights = spread_weights()
    x = np.random.default_rng(num_dims).normal(size=(4000, 5, 16)) * (np.arange(16) < num_dims)
    x *= 2.0 / np.linalg.norm(x, axis=-1, keepdims=True)
    floor, mean, error, squares = map(np.asarray, floor_and_distances(weights, x, float(num_dims)))
    assert len(weights) >= 1000 and (floor <= mean + 4 * error).all()
    # E D² is M² Σ α_j², and so the floor a fixed part of its root: 1/sqrt(2), the smallest, in the plane.
    np.testing.assert_allclose(floor, np.sqrt(squares / (1 + 2 / num_dims)), rtol=0.05, atol=1e-8)


def test_one_weight_that_dwarfs_the_others_leaves_them_their_digits():
    """Also in single precision: a floor made of rounding errors could lie above the mean distance."""
    weights = np.array([0.9, 3e-5, 1e-5, 2e-6])

    def bounds(dtype):
        w = jnp.asarray(weights, dtype)
        floor = theory.proved_mean_distance_floor(w, radius=1.0, num_dims=3)
        ceiling = theory.proved_distance_ceiling(w, radius=1.0, min_distance=0.5)
        return floor, ceiling, theory.proved_separability_upper_bound(w, floor, radius=1.0, threshold=1e-5)

    for single, double in zip(bounds(jnp.float32), bounds(jnp.float64), strict=True):
        assert single.dtype == jnp.float32
        np.testing.assert_allclose(single, double, rtol=1e-5)


def test_coverage_of_heads():
    """The closed form is the mean over independent heads."""
    hits = np.random.default_rng(4).uniform(size=(200_000, 3)) < 0.8
    assert float(theory.paper_head_coverage(0.8, 3)) == pytest.approx(hits.any(-1).mean(), abs=1e-3)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda w: theory.proved_distance_ceiling(w, radius=0), "radius"),
        (lambda w: theory.proved_distance_ceiling(w, radius=1, min_distance=-1), "min_distance"),
        (lambda w: theory.paper_separability_bounds(w, radius=1, min_distance=0, threshold=0), "threshold"),
        (lambda w: theory.proved_mean_distance_floor(w, radius=1, num_dims=0), "num_dims"),
        (lambda w: theory.proved_separability_upper_bound(w, w, radius=1, threshold=-1), "threshold"),
        (
            lambda w: theory.proved_separability_upper_bound(w, w, radius=1, threshold=1, exceeding=2),
            "exceeding",
        ),
        (lambda w: theory.paper_head_coverage(1.5, 2), "separability"),
        (lambda w: theory.paper_head_coverage(0.5, 0), "num_heads"),
    ],
)
def test_arguments_outside_their_range_are_named(call, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        call(jnp.full(3, 1 / 3))


def test_another_norm_of_the_weights_selects_alike():
    """L_p weights are softmax's times one number per row, so all distances scale alike."""
    rng = np.random.default_rng(5)
    s, x = rng.normal(size=(200, 10)) * 2, rng.normal(size=(200, 10, 3))
    of = jax.jit(jax.vmap(theory.retrieval, (0, 0, None)))
    softmax = of(lp(s, p=1), x, jnp.arange(10) < 3)
    for p in (2, 4):
        np.testing.assert_allclose(of(lp(s, p=p), x, jnp.arange(10) < 3), softmax, rtol=1e-12)
    assert 0.1 < float(softmax.recall.mean()) < 0.9
