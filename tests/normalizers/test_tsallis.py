"""The Tsallis family against the entmax package, its limits, finite differences, and the solver at its edges."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm.normalizers.entmax import asentmax_factor
from attnorm.normalizers.tsallis import Tsallis
from tests.checks import double_precision

TABLE = json.loads(Path(__file__).with_name("entmax_table.json").read_text())


@pytest.mark.parametrize("case", TABLE["cases"], ids=lambda case: f"{case['name']}{case.get('alpha', '')}")
def test_weights_and_gradients_of_the_entmax_package(case):
    logits, cotangent = (np.array(TABLE[name]) for name in ("logits", "cotangent"))
    function = getattr(attnorm, case["name"])
    with double_precision():
        params = {"alpha": jnp.asarray(case["alpha"])} if "alpha" in case else {}

        @jax.jit
        def both(logits, params, cotangent):
            weights, pull = jax.vjp(lambda s, params: function(s, **params), logits, params)
            return weights, *pull(cotangent)

        weights, d_logits, d_params = both(logits, params, cotangent)
    # The package bisects, and its gradient of alpha divides by what that leaves.
    np.testing.assert_allclose(weights, case["weights"], rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(d_logits, case["d_logits"], rtol=1e-9, atol=1e-12)
    if params:
        np.testing.assert_allclose(d_params["alpha"], case["d_alpha"], rtol=1e-8)


def test_the_slope_of_alpha_at_every_alpha():
    """Finite differences, also at alpha = 1, where the closed form is 0/0."""
    rng = np.random.default_rng(0)
    logits, cotangent = 2 * rng.normal(size=(2, 9))
    step = 1e-6

    def loss(alpha):
        return jnp.vdot(attnorm.entmax(logits, alpha=alpha), cotangent)

    with double_precision():
        alphas = jnp.array([0.4, 0.9999, 1.0, 1.001, 1.3, 1.5, 1.8, 1.99])
        slopes = jax.jit(jax.vmap(jax.grad(loss)))(alphas)
        losses = jax.jit(jax.vmap(loss))
        expected = (losses(alphas + step) - losses(alphas - step)) / (2 * step)
    np.testing.assert_allclose(slopes, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.5])
def test_second_derivatives(alpha):
    """The level is an implicit function, of which every derivative is asked for."""
    logits, direction, cotangent = np.random.default_rng(4).normal(size=(3, 8))

    @jax.jit
    def slope(logits, alpha):
        return jax.grad(lambda *x: jnp.vdot(attnorm.entmax(x[0], alpha=x[1]), cotangent), (0, 1))(
            logits, alpha
        )

    with double_precision():
        step = 1e-6
        _, got = jax.jvp(slope, (logits, jnp.asarray(alpha)), (direction, jnp.asarray(0.3)))
        ends = [slope(logits + h * direction, jnp.asarray(alpha + 0.3 * h)) for h in (step, -step)]
    for a, x, y in zip(got, *jax.device_get(ends), strict=True):
        np.testing.assert_allclose(a, (x - y) / (2 * step), rtol=1e-5, atol=1e-7)


def test_limits():
    logits = np.random.default_rng(1).normal(size=(3, 20)).astype(np.float32)
    sharp = 300 * logits  # softmax of low entropy keeps its temperature
    scale = {"beta": 0.4, "gamma": 1.5, "delta": 0.5}

    @jax.jit
    def pairs(alpha):
        softmax, entmax15 = attnorm.softmax(logits), attnorm.entmax15(logits)
        factor = asentmax_factor(jnp.array(20.0), **scale)
        return {
            "alpha 1": (attnorm.entmax(logits, alpha=1.0), softmax),
            "alpha near 1": (attnorm.entmax(logits, alpha=1 + 1e-5), softmax),
            "traced alpha": (attnorm.entmax(logits, alpha=alpha), softmax),
            "traced 1.5": (attnorm.entmax(logits, alpha=alpha + 0.5), entmax15),
            "elastic": (attnorm.elastic(logits, tau=0.0), softmax),
            "stieltjes": (attnorm.stieltjes(logits / 1000, q=1000.0), softmax),
            "all": (attnorm.top_k(logits, k=20), softmax),
            "beta 0": (attnorm.asentmax(logits, beta=0.0), entmax15),
            "asentmax": (attnorm.asentmax(logits, **scale), attnorm.entmax15(factor * logits)),
            "low entropy": (attnorm.adaptive_temperature(sharp), attnorm.softmax(sharp)),
            "sparse": (attnorm.entmax(logits, alpha=2.0), attnorm.sparsemax(logits)),
        }

    loose = {"alpha near 1": 3e-4, "stieltjes": 2e-2}
    for name, (got, expected) in pairs(jnp.float32(1.0)).items():
        np.testing.assert_allclose(got, expected, rtol=loose.get(name, 1e-5), atol=1e-7, err_msg=name)


def test_stick_breaking_leaves_what_no_key_took():
    logits = np.random.default_rng(2).normal(size=(3, 6)).astype(np.float32)
    left = np.prod(1 - 1 / (1 + np.exp(-logits)), axis=-1)
    np.testing.assert_allclose(1 - jax.jit(attnorm.stick_breaking)(logits).sum(-1), left, rtol=1e-4)
    strictly_before = jax.jit(attnorm.stick_breaking)(logits[:2, :2], where=np.tri(2, k=-1, dtype=bool))
    np.testing.assert_allclose(strictly_before, [[0, 0], [1 / (1 + np.exp(-logits[1, 0])), 0]], rtol=1e-6)


def test_top_k_keeps_ties_and_passes_no_gradient_to_the_rest():
    logits = jnp.array([1.0, 2.0, 2.0, 0.0])
    weights, slopes = jax.jit(lambda s: (attnorm.top_k(s, k=1), jax.jacrev(attnorm.top_k)(s, k=1)))(logits)
    np.testing.assert_allclose(weights, [0, 0.5, 0.5, 0])
    np.testing.assert_allclose(slopes[1], [0, 0.25, -0.25, 0])
    for place in range(4):
        assert np.isnan(attnorm.top_k(logits.at[place].set(jnp.nan), k=2)).any()


def test_a_traced_alpha_out_of_range_is_not_hidden():
    """It cannot be refused, so whoever learns it must see it."""
    weights = jax.jit(jax.vmap(lambda alpha: attnorm.entmax(jnp.arange(3.0), alpha=alpha)))
    got = weights(jnp.array([2.0, 2.5, 0.05, np.nan]))
    assert np.isfinite(got[0]).all() and np.isnan(got[1:]).all()


LONG = 100_000


@pytest.mark.slow
@pytest.mark.parametrize("alpha", [0.5, 1.5, 2.0])
@pytest.mark.parametrize("kind", ["normal", "equal", "geometric", "quantised", "large"])
def test_long_rows_sum_to_one_in_float32(alpha, kind):
    """100 000 keys: few of them in the support, all of them, or a support that shrinks key by key."""
    rng = np.random.default_rng(3)
    logits = {
        "normal": lambda: rng.normal(size=LONG),
        "equal": lambda: np.full(LONG, 3.0),
        "geometric": lambda: -np.exp2(-np.linspace(0, 30, LONG)),
        "quantised": lambda: np.round(4 * rng.normal(size=LONG)) / 4,
        "large": lambda: 1e4 * rng.normal(size=LONG),
    }[kind]().astype(np.float32)
    weights = np.asarray(WEIGHTS[alpha](logits))
    assert weights.min() >= 0
    np.testing.assert_allclose(weights.sum(dtype=np.float64), 1, atol=5e-6)
    order = np.argsort(logits, kind="stable")
    assert (np.diff(weights[order]) >= 0).all()


WEIGHTS = {alpha: jax.jit(Tsallis(alpha).weights) for alpha in (0.5, 1.5, 2.0)}


@pytest.mark.parametrize(
    "name, params, fragments",
    [
        ("entmax", {"alpha": 2.5}, ["alpha ", "from 0.1 to 2", "2.5"]),
        ("entmax", {"alpha": np.array([1.5, np.nan])}, ["alpha ", "from 0.1 to 2", "nan"]),
        ("entmax", {"alpha": np.array([[1.5], [1.2], [1.1]])}, ["alpha must", "(3, 1)", "(2, 5)"]),
        ("stieltjes", {"q": 1.0}, ["q ", "from 1.2 to 1000", "1.0"]),
        ("asentmax", {"beta": -1.0}, ["beta ", "zero or positive"]),
        ("asentmax", {"gamma": np.inf}, ["gamma ", "finite"]),
        ("elastic", {"tau": 0.1}, ["tau ", "zero or negative", "0.1"]),
        ("top_k", {"k": 0}, ["k ", "at least 1", "0"]),
        ("top_k", {"k": 2.5}, ["k ", "whole number", "2.5"]),
        ("top_k", {"k": True}, ["k ", "whole number", "True"]),
        ("top_k", {"k": np.array(2)}, ["k ", "whole number"]),
    ],
)
def test_bad_parameters(name, params, fragments):
    with pytest.raises(ValueError) as caught:
        getattr(attnorm, name)(jnp.zeros((2, 5)), **params)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
