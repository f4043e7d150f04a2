"""Bounds on gradients and differences: searched for violations over random and optimised logits."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm import lp, theory

KEYS = 6
SLACK = 1 + 1e-9


def response_squared(logits, x, p):
    """‖T J_p x‖² for the unit vector along x, from Σ w^(2/p) d²."""
    x = x / jnp.linalg.norm(x)
    w = jax.nn.softmax(p * logits)
    return jnp.sum(w ** (2 / p) * (x - w @ x) ** 2)


@functools.partial(jax.jit)
@functools.partial(jax.vmap, in_axes=(0, 0, 0))
def ascend(logits, x, p):
    """The largest response that gradient ascent finds from a start, and the logits and direction there."""

    def step(state, _):
        slopes = jax.grad(response_squared, argnums=(0, 1))(*state, p)
        size = 1e-9 + jnp.sqrt(sum(jnp.sum(slope**2) for slope in slopes))
        return jax.tree.map(lambda a, slope: a + 0.05 * slope / size, state, slopes), None

    (logits, x), _ = jax.lax.scan(step, (logits, x), length=400)
    return jnp.sqrt(response_squared(logits, x, p)), logits, x


def test_search_for_larger_gradients_than_the_theorem_allows():
    """1400 optimised starts: none is above C_p, and for 1 <= p <= 2 the search comes to C_p itself."""
    powers = np.repeat([0.5, 1.0, 1.25, 1.5, 2.0, 3.0, 8.0], 200)
    rng = np.random.default_rng(0)
    found, logits, x = ascend(
        3 * rng.normal(size=(len(powers), KEYS)), rng.normal(size=(len(powers), KEYS)), powers
    )
    for p in np.unique(powers):
        largest = float(found[powers == p].max())
        bound = float(theory.proved_spectral_bound(KEYS, p=p))
        assert largest <= bound * SLACK, p
        if 1 <= p <= 2:
            assert largest >= 0.995 * bound, p
    # The formula that was optimised is the library's derivative.
    for at in (0, 250, 900, 1399):
        p, unit = float(powers[at]), x[at] / jnp.linalg.norm(x[at])
        _, tangent = jax.jvp(lambda s, p=p: lp(s, p=p), (logits[at],), (unit,))
        assert float(jnp.linalg.norm(tangent)) == pytest.approx(float(found[at]), rel=1e-9)


@pytest.mark.parametrize("temperature", (0.25, 2.0))
def test_two_equal_logits_attain_the_bound(temperature):
    for p in (1.0, 1.3, 2.0):
        for L in (2, KEYS):
            s = np.where(np.arange(L) < 2, 0.0, -100.0)
            norm = theory.jacobian_spectral_norm(lp(s / temperature, p=p), p) / temperature
            bound = theory.proved_spectral_bound(L, p=p, temperature=temperature)
            assert float(norm) == pytest.approx(float(bound), rel=1e-9)


def test_the_papers_bound_fails_as_a_spectral_norm_and_holds_for_entries():
    temperature = 0.5
    s = np.random.default_rng(1).normal(size=(1000, KEYS)) * 2
    s[:2] = [[0, 0, -9, -9, -9, -9], [0, 0, -99, -99, -99, -99]]
    J = np.asarray(theory.jacobian(lp(s / temperature, p=1), 1)) / temperature
    norms = np.linalg.norm(J, 2, axis=(1, 2))
    assert np.abs(J).max() <= float(theory.proved_largest_entry_bound(temperature)) * SLACK
    assert norms.max() <= float(theory.proved_spectral_bound(KEYS, p=1, temperature=temperature)) * SLACK
    assert norms[1] > 1.99 * float(theory.paper_gradient_bound(temperature))
    assert np.mean(norms > float(theory.paper_gradient_bound(temperature))) > 0.1
    # At low temperatures the paper caps the gradient at sqrt(2), and it is not capped.
    cold = theory.jacobian_spectral_norm(lp(jnp.zeros(2), p=1), 1) / 1e-3
    assert float(theory.paper_gradient_bound(1e-3)) == pytest.approx(math.sqrt(2))
    assert float(cold) == pytest.approx(500)


def norm_with_one_above(p, num_keys, above):
    """‖J_p‖ of one logit above num_keys - 1 equal ones, on the plane of the two levels and off it."""
    y = np.exp([above, 0.0])
    y /= (y[0] ** p + (num_keys - 1) * y[1] ** p) ** (1 / p)
    root, w = np.sqrt(num_keys - 1), y**p
    plane = np.diag(y) - np.outer([y[0], root * y[1]], [w[0], root * w[1]])
    return max(np.linalg.norm(plane, 2), y[1])


def test_two_is_the_largest_p_whose_worst_gradient_does_not_grow():
    """Above p = 2 rows of one larger logit reach a fixed part of L^(1/2 - 1/p); at p = 2 nothing grows."""
    lengths = (10, 100, 1000, 10000)
    for p in (2.0, 2.5, 4.0, 16.0):
        # w = 1/2 at the larger logit, and some room around it.
        worst = [
            max(norm_with_one_above(p, L, np.log(L - 1) / p + shift / p) for shift in (-1, 0, 1, 2))
            for L in lengths
        ]
        bounds = [float(theory.proved_spectral_bound(L, p=p)) for L in lengths]
        assert all(norm <= bound * SLACK for norm, bound in zip(worst, bounds, strict=True))
        assert all(norm >= 0.45 * bound for norm, bound in zip(worst, bounds, strict=True)), p
        if p == 2:
            assert max(worst) <= 2**-0.5 * SLACK
        else:
            assert worst[-1] / worst[0] == pytest.approx(1000 ** (0.5 - 1 / p), rel=0.2)
    # p = ∞: the logit that is largest by any amount moves all weights, J = I - 1 e_kᵀ up to that amount.
    s = jnp.where(jnp.arange(400) == 7, 1e-6, 0.0)
    J = jax.jit(jax.jacrev(lambda s: lp(s, p=math.inf)))(s)
    bound = float(theory.proved_spectral_bound(400, p=math.inf))
    assert bound == 20 and np.linalg.norm(J, 2) == pytest.approx(bound, rel=1e-5)


@pytest.mark.parametrize("p", (0.5, 1.0, 2.0, 3.0, 8.0))
def test_norms_at_random_and_extreme_weights(p):
    rng = np.random.default_rng(2)
    s = rng.normal(size=(1000, KEYS)) * rng.choice([0.1, 1.0, 5.0, 30.0], (1000, 1))
    s[:KEYS] = np.where(np.arange(KEYS) <= np.arange(KEYS)[:, None], 0, -50)  # one to all keys equal
    y = lp(s, p=p)
    spectral, frobenius = theory.jacobian_spectral_norm(y, p), theory.jacobian_frobenius_norm(y, p)
    assert float(spectral.max()) <= float(theory.proved_spectral_bound(KEYS, p=p)) * SLACK
    assert float(frobenius.max()) <= float(theory.proved_frobenius_bound(KEYS, p=p)) * SLACK
    if p >= 2:
        assert (spectral <= theory.proved_spectral_bound_at(y, p=p) * SLACK + 1e-12).all()
        assert (
            theory.proved_spectral_bound_at(y, p=p) <= theory.proved_spectral_bound(KEYS, p=p) * SLACK
        ).all()


jacobians_at_infinity = jax.jit(jax.vmap(jax.jacrev(lambda s: lp(s, p=math.inf))))


@pytest.mark.parametrize("temperature", (0.25, 1.0))
def test_norms_at_infinity(temperature):
    """Random rows; one logit above equal ones by little to much; two levels and ties in every proportion."""
    rng = np.random.default_rng(7)
    random = rng.normal(size=(1000, KEYS)) * rng.choice([1e-3, 0.1, 1.0, 5.0, 30.0], (1000, 1))
    first = np.arange(KEYS) < 1
    above = np.where(first, 10.0 ** np.linspace(-12, 1, 200)[:, None], 0)
    below_two = np.where(np.arange(KEYS) < np.arange(1, KEYS)[:, None], 0, -3) + np.where(first, 1e-9, 0)
    ties = np.where(np.arange(KEYS) < np.arange(1, KEYS + 1)[:, None], 0.0, -1.0)
    s = np.concatenate([random, above, below_two, ties])
    J = np.asarray(jacobians_at_infinity(s / temperature)) / temperature
    spectral, frobenius = np.linalg.norm(J, 2, axis=(1, 2)), np.linalg.norm(J, axis=(1, 2))
    for norms, bound in (
        (spectral, theory.proved_spectral_bound),
        (frobenius, theory.proved_frobenius_bound),
    ):
        most = float(bound(KEYS, p=math.inf, temperature=temperature))
        assert norms.max() <= most * SLACK
        assert norms.max() == pytest.approx(most, rel=1e-9)  # attained by the smallest lead
        assert np.median(norms[:1000]) < 0.9 * most


def test_frobenius_bound_is_attained_at_two():
    at_two = theory.jacobian_frobenius_norm(lp(jnp.zeros(KEYS), p=2), 2)
    assert float(at_two) == pytest.approx(float(theory.proved_frobenius_bound(KEYS, p=2)), rel=1e-12)


@pytest.mark.parametrize(
    "F",
    [
        lambda s: jax.nn.softplus(s),
        lambda s: 0.05 + s**2,
        lambda s: jnp.exp(s + jnp.sin(5 * s) / 2),
    ],
)
def test_any_smooth_positive_function(F):
    rng = np.random.default_rng(3)
    s = rng.normal(size=(1000, KEYS)) * rng.choice([0.1, 1.0, 3.0], (1000, 1))
    s[:3] = [[0] * KEYS, [-0.25] * KEYS, [9.0] + [-9.0] * (KEYS - 1)]

    @jax.jit
    @jax.vmap
    def of(s):
        slopes = jax.vmap(jax.grad(F))(s)
        jacobians = [
            jax.jacfwd(lambda s, p=p: F(s) / jnp.sum(F(s) ** p) ** (1 / p))(s) for p in (1.0, 2.0, 3.0)
        ]
        bounds = theory.proved_smooth_gradient_bounds(F(s), slopes)
        return jnp.stack(jacobians), bounds, jnp.max(jnp.abs(slopes / F(s)))

    jacobians, (first, second), steepest = of(s)
    norms = np.linalg.norm(np.asarray(jacobians), 2, axis=(2, 3))
    assert (norms[:, 0] <= first * SLACK).all() and (norms[:, 0] <= second * SLACK).all()
    for column, p in enumerate((1.0, 2.0, 3.0)):
        bounds = [float(theory.proved_spectral_bound(KEYS, p=p, temperature=1 / x)) for x in steepest]
        assert (norms[:, column] <= np.array(bounds) * SLACK).all()


@pytest.mark.parametrize("p", (1.0, 2.0, 4.0, math.inf))
def test_finite_differences(p):
    rng = np.random.default_rng(4)
    s, v = rng.normal(size=(1000, KEYS)) * 3, rng.normal(size=(1000, KEYS))
    s[:400, 1] = s[:400, 0]  # two equal logits, moved apart
    v[:200] = [1, -1, 0, 0, 0, 0]
    v /= np.linalg.norm(v, axis=-1, keepdims=True)
    temperatures, steps = 10 ** rng.uniform(-2, 1, 1000), 10 ** rng.uniform(-3, 1.5, 1000)
    measured = jax.jit(
        jax.vmap(lambda s, v, T, e: theory.finite_difference(s, v, temperature=T, step=e, p=p))
    )(s, v, temperatures, steps)
    bounds = jax.vmap(lambda T, e: theory.proved_finite_difference_bound(KEYS, p=p, temperature=T, step=e))(
        temperatures, steps
    )
    assert (measured <= bounds * SLACK).all()
    assert float((measured / bounds).max()) > (0.6 if p <= 2 else 0.3)


def test_random_directions_see_the_frobenius_norm():
    """E g² -> ‖J‖_F² / L as ε -> 0, far below ‖J‖₂² where one direction dominates."""
    s = jnp.where(jnp.arange(64) < 2, 0.0, -30.0)
    v = np.random.default_rng(5).normal(size=(20_000, 64))
    v /= np.linalg.norm(v, axis=-1, keepdims=True)
    for p in (1.0, 2.0):
        g = jax.jit(jax.vmap(lambda v, p=p: theory.finite_difference(s, v, temperature=1.0, step=1e-4, p=p)))(
            v
        )
        y = lp(s, p=p)
        expected = float(theory.jacobian_frobenius_norm(y, p)) ** 2 / 64
        assert float(jnp.mean(g**2)) == pytest.approx(expected, rel=0.05)
        assert float(jnp.sqrt(jnp.mean(g**2))) < 0.2 * float(theory.jacobian_spectral_norm(y, p))


@pytest.mark.parametrize("p", (1.0, 4.0))
def test_top_direction_is_the_leading_singular_vector(p):
    rng = np.random.default_rng(6)
    s = rng.normal(size=(200, KEYS)) * 3
    norms, directions = jax.jit(jax.vmap(lambda s: theory.top_direction(lambda s: lp(s, p=p), s)))(s)
    _, values, rows = np.linalg.svd(np.asarray(theory.jacobian(lp(s, p=p), p)))
    assert (norms <= values[:, 0] * SLACK).all()
    np.testing.assert_allclose(norms, values[:, 0], rtol=2e-2)
    clear = values[:, 1] < 0.8 * values[:, 0]
    assert clear.sum() > 50
    np.testing.assert_allclose(np.abs((directions * rows[:, 0]).sum(-1))[clear], 1, atol=1e-6)


def test_top_direction_of_weights_that_cannot_change():
    norm, v = theory.top_direction(lambda s: jnp.zeros_like(s), jnp.ones(4))
    assert float(norm) == 0 and float(jnp.linalg.norm(v)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: theory.paper_gradient_bound(0.0), "temperature"),
        (lambda: theory.proved_largest_entry_bound(-1.0), "temperature"),
        (lambda: theory.proved_spectral_bound(0, p=1), "num_keys"),
        (lambda: theory.proved_spectral_bound(3, p=0), "p"),
        (lambda: theory.proved_spectral_bound_at(jnp.ones(3), p=1.5), "p"),
        (lambda: theory.proved_frobenius_bound(3, p=math.nan), "p"),
        (lambda: theory.proved_finite_difference_bound(3, p=1, temperature=1, step=0), "step"),
        (lambda: theory.finite_difference(jnp.ones(3), jnp.ones(3), temperature=0, step=1), "temperature"),
    ],
)
def test_arguments_outside_their_range_are_named(call, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        call()
