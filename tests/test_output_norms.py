"""Normalisation, rescaling and gating of attention's output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm import output_norms
from tests.checks import double_precision
from tests.contract.helpers import make_arrays


def draw(seed=0, shape=(2, 5, 3, 8)):
    return np.random.default_rng(seed).normal(size=shape)


def test_the_formulas_in_float64():
    x, gain, bias = draw(), draw(1, (3, 8)), draw(2, (3, 1))
    eps = 1e-3

    @jax.jit
    def normalized(x, gain, bias):
        return (
            output_norms.head_rms(x, gain=gain, eps=eps),
            output_norms.head_layer(x, gain=gain, bias=bias, eps=eps),
            output_norms.global_layer(x, gain=gain, bias=bias, eps=eps),
        )

    with double_precision():
        rms, layer, whole = jax.device_get(normalized(x, gain, bias))
    np.testing.assert_allclose(rms, gain * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps), rtol=1e-12)
    for got, axis in ((layer, -1), (whole, (-2, -1))):
        mean, variance = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
        np.testing.assert_allclose(got, gain * (x - mean) / np.sqrt(variance + eps) + bias, rtol=1e-11)


def test_norms_of_each_head_are_the_same_for_every_p():
    arrays = [x.astype(np.float64) for x in make_arrays(T=9, S=9, N=2, K=1)]

    @jax.jit
    def normalized(p, *arrays):
        rule = attnorm.get_normalizer("lp", p=p)
        out = attnorm.dot_product_attention(*arrays, normalizer=rule, implementation="reference")
        norms = output_norms.head_rms, output_norms.head_layer, output_norms.global_layer
        return [norm(out, eps=1e-30) for norm in norms]

    with double_precision():
        first, *others = [jax.device_get(normalized(p, *arrays)) for p in (1.0, 0.5, 2.0, 5.0)]
    for result in others:
        for got, expected in zip(result[:2], first[:2], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-10)
        # Over all heads together it is not: each head has a factor of its own.
        assert not np.allclose(result[2], first[2], rtol=1e-3)


def test_rescaling_makes_uniform_softmax_l2():
    """All logits 0: what remains of L2 over softmax is sqrt of the number of keys."""
    value = make_arrays(T=7, S=7)[2]
    count = 1 + np.arange(7)[:, None, None]

    @jax.jit
    def outputs(value):
        uniform = jnp.tri(7) / (1 + jnp.arange(7))[:, None]
        out = jnp.einsum("ts,bskh->btkh", uniform, value)
        l2 = jnp.einsum("ts,bskh->btkh", attnorm.l2(jnp.zeros((7, 7)), where=jnp.tri(7, dtype=bool)), value)
        rescaled = output_norms.rescale_sqrt_position(out, count), output_norms.unit_scale(out, count)
        return l2, *rescaled, output_norms.rescale_sqrt_position(out, 0 * count)

    l2, rescaled, unit, empty = outputs(value)
    np.testing.assert_allclose(rescaled, l2, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(unit, l2 / np.exp(0.5), rtol=1e-5, atol=1e-6)
    assert np.isfinite(empty).all()


def test_gate_and_polar():
    x, gate = draw(), draw(1)
    n_eff = np.random.default_rng(2).uniform(1, 9, (2, 5, 3))

    @jax.jit
    def both(x, gate, n_eff):
        return output_norms.gated(x, gate), output_norms.polar(x, n_eff, beta=0.3, eps=1e-30)

    with double_precision():
        gated, polar = jax.device_get(both(x, gate, n_eff))
    np.testing.assert_allclose(gated, x / (1 + np.exp(-gate)), rtol=1e-12)
    np.testing.assert_allclose(
        np.sqrt(np.mean(np.square(polar), -1)), np.tanh(0.3 * np.log1p(n_eff)), rtol=1e-12
    )
    cosine = (polar * x).sum(-1) / np.linalg.norm(polar, axis=-1) / np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(cosine, 1, rtol=1e-12)


@pytest.mark.parametrize("name", ["head_rms", "head_layer", "global_layer"])
def test_zeros_and_narrow_dtypes(name):
    function = getattr(output_norms, name)
    zeros = jnp.zeros((2, 3, 4), jnp.bfloat16)
    value, slope = jax.jit(jax.value_and_grad(lambda x: function(x).astype(jnp.float32).sum()))(zeros)
    assert slope.dtype == jnp.bfloat16 and value == 0
    assert np.isfinite(np.asarray(slope, np.float32)).all()
    assert jax.eval_shape(function, zeros).dtype == jnp.bfloat16


def test_bad_arguments_are_named():
    x = jnp.ones((2, 3, 4))
    for call, error, words in (
        (lambda: output_norms.head_rms(x, eps=0.0), ValueError, "eps must be positive, got 0.0"),
        (lambda: output_norms.head_rms(jnp.ones(3)), ValueError, r"output must have shape .* got \(3,\)"),
        (lambda: output_norms.head_rms(jnp.ones((2, 3), int)), TypeError, "output .* int32"),
        (lambda: output_norms.head_rms(x, eps="x"), ValueError, "eps must be positive, got 'x'"),
        (lambda: output_norms.head_rms(x, gain=jnp.ones((5, 1, 1, 1))), ValueError, "gain must broadcast"),
        (lambda: output_norms.head_layer(x, bias=jnp.ones(3)), ValueError, "bias must broadcast"),
        (lambda: output_norms.global_layer(x, bias=jnp.ones((5, 1, 1))), ValueError, "bias must broadcast"),
        (lambda: output_norms.gated(x, jnp.ones(3)), ValueError, r"gate .* \(2, 3, 4\), got shape \(3,\)"),
        (lambda: output_norms.unit_scale(x, jnp.ones((5, 1, 1))), ValueError, "count must broadcast"),
        (lambda: output_norms.polar(x, jnp.ones((2, 2))), ValueError, "effective_count must broadcast"),
    ):
        with pytest.raises(error, match=words):
            call()
