"""The functions of attnorm.theory against automatic differentiation, SVD and known values, in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm import lp, softmax, theory

ORDERS = (0.5, 1.0, 1.5, 2.0, 3.0, 8.0)


def logits(*shape, scale=2.0):
    return scale * jnp.asarray(np.random.default_rng(0).standard_normal(shape))


def test_entropy_of_known_distributions():
    assert float(theory.entropy(jnp.full(32, 1 / 32))) == pytest.approx(math.log(32), abs=1e-14)
    assert float(theory.entropy(jnp.array([1.0, 0.0, 0.0]))) == 0
    np.testing.assert_allclose(
        theory.entropy(jnp.array([[0.5, 0.9], [0.5, 0.1]]), axis=0),
        [math.log(2), -0.9 * math.log(0.9) - 0.1 * math.log(0.1)],
        rtol=1e-14,
    )


def test_entropy_has_a_finite_gradient_where_a_weight_is_zero():
    gradient = jax.grad(theory.entropy)(jnp.array([0.5, 0.5, 0.0]))
    np.testing.assert_allclose(gradient, [math.log(2) - 1, math.log(2) - 1, 0], atol=1e-14)


@pytest.mark.parametrize("order", (0.5, 2.0, 3.0, 40.0))
def test_renyi_entropy_follows_its_definition(order):
    a = np.asarray(softmax(logits(6, 12)))
    expected = np.log(np.sum(a**order, -1)) / (1 - order)
    np.testing.assert_allclose(theory.renyi_entropy(a, order), expected, rtol=1e-12)


def test_renyi_entropy_limits():
    a = softmax(logits(12))
    shannon = float(theory.entropy(a))
    assert float(theory.renyi_entropy(a, 1)) == shannon
    assert float(theory.renyi_entropy(a, 1 + 1e-7)) == pytest.approx(shannon, abs=1e-6)
    assert float(theory.renyi_entropy(jnp.array([0.5, 0.5, 0.0]), 0)) == pytest.approx(math.log(2), abs=1e-15)
    assert float(theory.renyi_entropy(a, math.inf)) == pytest.approx(-math.log(float(a.max())), abs=1e-15)
    assert float(theory.renyi_entropy(a, 5000.0)) == pytest.approx(-math.log(float(a.max())), rel=1e-3)


def test_effective_keys_do_not_depend_on_the_norm():
    s = logits(6, 12)
    a = np.asarray(softmax(s))
    for p in (1.0, 2.0, 3.0, math.inf):
        np.testing.assert_allclose(theory.effective_keys(lp(s, p=p)), 1 / np.sum(a**2, -1), rtol=1e-12)
    assert float(theory.effective_keys(jnp.ones(17))) == pytest.approx(17, abs=1e-12)
    np.testing.assert_allclose(theory.effective_keys(a), np.exp(theory.renyi_entropy(a, 2.0)), rtol=1e-12)


@pytest.mark.parametrize("p", (*ORDERS, math.inf))
def test_lp_is_softmax_times_the_factor(p):
    s = logits(6, 12, scale=8.0)
    a = softmax(s)
    factor = theory.lp_from_softmax_factor(a, p)
    np.testing.assert_allclose(factor[:, None] * a, lp(s, p=p), rtol=1e-12, atol=1e-15)
    exponent = 1 if p == math.inf else 1 - 1 / p
    np.testing.assert_allclose(factor, np.exp(exponent * theory.renyi_entropy(a, p)), rtol=1e-12)


def test_rows_without_keys_are_zero():
    row = jnp.zeros((6, 12))
    for value in (
        theory.entropy(row),
        theory.renyi_entropy(row, 3.0),
        theory.renyi_entropy(row, math.inf),
        theory.effective_keys(row),
        theory.lp_from_softmax_factor(row, 2.0),
        theory.jacobian_frobenius_norm(row, 2.0),
        theory.jacobian_spectral_norm(row, 2.0),
    ):
        np.testing.assert_array_equal(value, np.zeros(6))


@pytest.mark.parametrize("p", ORDERS)
def test_jacobian_is_the_derivative_of_the_weights(p):
    s = logits(12)
    derivative = np.asarray(jax.jacfwd(lambda s: lp(s, p=p))(s))
    y = lp(s, p=p)
    np.testing.assert_allclose(theory.jacobian(y, p), derivative, atol=1e-13)
    assert float(theory.jacobian_frobenius_norm(y, p)) == pytest.approx(
        float(np.sqrt(np.sum(derivative**2))), rel=1e-12
    )
    assert float(theory.jacobian_spectral_norm(y, p)) == pytest.approx(
        float(np.linalg.svd(derivative, compute_uv=False)[0]), rel=1e-12
    )


def test_jacobian_norms_map_over_rows():
    y = np.asarray(lp(logits(6, 12), p=2.0))
    for norm in (theory.jacobian_frobenius_norm, theory.jacobian_spectral_norm):
        rows = [float(norm(row, 2.0)) for row in y]
        np.testing.assert_allclose(norm(y, 2.0), rows, rtol=1e-13)
        np.testing.assert_array_equal(norm(y.reshape(2, 3, 12), 2.0), norm(y, 2.0).reshape(2, 3))


def test_jacobian_norms_of_uniform_weights():
    n = 64
    l1, l2 = jnp.full(n, 1 / n), jnp.full(n, n**-0.5)
    assert float(theory.jacobian_spectral_norm(l1, 1)) == pytest.approx(1 / n, rel=1e-12)
    assert float(theory.jacobian_spectral_norm(l2, 2)) == pytest.approx(n**-0.5, rel=1e-12)
    assert float(theory.jacobian_frobenius_norm(l1, 1)) == pytest.approx(math.sqrt(n - 1) / n, rel=1e-12)
    assert float(theory.jacobian_frobenius_norm(l2, 2)) == pytest.approx(math.sqrt(1 - 1 / n), rel=1e-12)


@pytest.mark.parametrize("p", (1.0, 1.5, 2.0))
def test_spectral_norm_is_bounded_and_two_equal_keys_attain_the_bound(p):
    bound = 2 ** (-1 / p)
    norms = theory.jacobian_spectral_norm(lp(logits(200, 4, scale=4.0), p=p), p)
    assert float(norms.max()) <= bound * (1 + 1e-12)
    pair = jnp.array([0.0, 0.0, -60.0, -60.0])
    assert float(theory.jacobian_spectral_norm(lp(pair, p=p), p)) == pytest.approx(bound, rel=1e-12)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda a: theory.renyi_entropy(a, -1.0), "order"),
        (lambda a: theory.renyi_entropy(a, math.nan), "order"),
        (lambda a: theory.lp_from_softmax_factor(a, 0.0), "p"),
        (lambda a: theory.jacobian(a, math.inf), "p"),
        (lambda a: theory.jacobian_frobenius_norm(a, -2.0), "p"),
        (lambda a: theory.jacobian_spectral_norm(a, math.nan), "p"),
    ],
)
def test_arguments_outside_their_range_are_named(call, name):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        call(jnp.array([0.5, 0.5]))
