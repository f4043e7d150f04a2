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
    with double_precision():
        rms = output_norms.head_rms(jnp.asarray(x), gain=gain, eps=eps)
        layer = output_norms.head_layer(jnp.asarray(x), gain=gain, bias=bias, eps=eps)
        whole = output_norms.global_layer(jnp.asarray(x), gain=gain, bias=bias, eps=eps)
    np.testing.assert_allclose(rms, gain * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps), rtol=1e-12)
    for got, axis in ((layer, -1), (whole, (-2, -1))):
        mean, variance = x.mean(axis, keepdims=True), x.var(axis, keepdims=True)
        np.testing.assert_allclose(got, gain * (x - mean) / np.sqrt(variance + eps) + bias, rtol=1e-11)


def test_rms_of_the_output_is_the_same_for_every_p():
    query, key, value = (x.astype(np.float64) for x in make_arrays(T=9, S=9, N=2, K=1))

    def normalized(p, normalize):
        out = attnorm.dot_product_attention(
            query, key, value, normalizer=attnorm.get_normalizer("lp", p=p), implementation="reference"
        )
        return normalize(out, eps=1e-30)

    with double_precision():
        for normalize in (output_norms.head_rms, output_norms.head_layer):
            expected = normalized(1.0, normalize)
            for p in (0.5, 2.0, 5.0, np.inf):
                np.testing.assert_allclose(normalized(p, normalize), expected, rtol=1e-10)
        # Over all heads together it is not: each head has a factor of its own.
        assert not np.allclose(
            normalized(1.0, output_norms.global_layer), normalized(2.0, output_norms.global_layer), rtol=1e-3
        )


def test_rescaling_makes_uniform_softmax_l2():
    """All logits 0: what remains of L2 over softmax is sqrt of the number of keys."""
    _, key, value = make_arrays(T=7, S=7)
    query = np.zeros((2, 7, 4, 16), np.float32)
    outputs = [
        attnorm.dot_product_attention(query, key, value, normalizer=name, is_causal=True)
        for name in ("softmax", "l2")
    ]
    count = 1 + np.arange(7)[:, None, None]
    np.testing.assert_allclose(
        output_norms.rescale_sqrt_position(outputs[0], count), outputs[1], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        output_norms.unit_scale(outputs[0], count), outputs[1] / np.exp(0.5), rtol=1e-5, atol=1e-6
    )
    assert not np.isnan(output_norms.rescale_sqrt_position(outputs[0], np.zeros((7, 1, 1), int))).any()


def test_gate_and_polar():
    x, gate = draw(), draw(1)
    with double_precision():
        gated = output_norms.gated(jnp.asarray(x), jnp.asarray(gate))
        n_eff = jnp.asarray(np.random.default_rng(2).uniform(1, 9, (2, 5, 3)))
        polar = output_norms.polar(jnp.asarray(x), n_eff, beta=0.3, eps=1e-30)
    np.testing.assert_allclose(gated, x / (1 + np.exp(-gate)), rtol=1e-12)
    np.testing.assert_allclose(
        np.sqrt(np.mean(np.square(polar), -1)), np.tanh(0.3 * np.log1p(n_eff)), rtol=1e-12
    )
    polar = np.asarray(polar)
    cosine = (polar * x).sum(-1) / np.linalg.norm(polar, axis=-1) / np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(cosine, 1, rtol=1e-12)


@pytest.mark.parametrize("name", ["head_rms", "head_layer", "global_layer"])
def test_zeros_and_narrow_dtypes(name):
    function = getattr(output_norms, name)
    zeros = jnp.zeros((2, 3, 4), jnp.bfloat16)
    value, pull = jax.vjp(function, zeros)
    assert value.dtype == jnp.bfloat16 and not value.any()
    assert np.isfinite(np.asarray(pull(jnp.ones_like(zeros))[0], np.float32)).all()


def test_bad_arguments_are_named():
    x = jnp.ones((2, 3, 4))
    for call, error, words in (
        (lambda: output_norms.head_rms(x, eps=0.0), ValueError, "eps must be positive, got 0.0"),
        (lambda: output_norms.head_rms(jnp.ones(3)), ValueError, r"output must have shape .* got \(3,\)"),
        (lambda: output_norms.head_rms(jnp.ones((2, 3), int)), TypeError, "output .* int32"),
        (lambda: output_norms.gated(x, jnp.ones(3)), ValueError, r"gate .* \(2, 3, 4\), got shape \(3,\)"),
        (lambda: output_norms.unit_scale(x, jnp.ones((5, 1, 1))), ValueError, "count must broadcast"),
        (lambda: output_norms.polar(x, jnp.ones((2, 2))), ValueError, "effective_count must broadcast"),
    ):
        with pytest.raises(error, match=words):
            call()
