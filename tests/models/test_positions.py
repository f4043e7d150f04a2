"""Rotary positions against complex numbers in float64, and ALiBi's features against its bias."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm.models.positions import alibi_slopes, rope_frequencies, rotate, with_alibi, yarn_logit_factor

rng = np.random.default_rng(0)


def test_rotation_is_a_product_with_complex_numbers():
    x = rng.standard_normal((2, 7, 3, 10)).astype(np.float32)
    positions = rng.integers(0, 2000, (2, 7))
    frequencies = rope_frequencies(6, base=500.0)
    np.testing.assert_allclose(frequencies, [1, 500 ** (-1 / 3), 500 ** (-2 / 3)])
    turned = rotate(jnp.asarray(x), jnp.asarray(positions), frequencies)
    z = (x[..., :3] + 1j * x[..., 3:6]) * np.exp(1j * positions[..., None, None] * frequencies)
    expected = np.concatenate([z.real, z.imag, x[..., 6:]], axis=-1)
    np.testing.assert_allclose(turned, expected, atol=2e-4)
    assert rotate(jnp.asarray(x, jnp.bfloat16), jnp.asarray(positions), frequencies).dtype == jnp.bfloat16


def test_products_depend_on_the_distance_alone():
    query, key = jnp.asarray(rng.standard_normal((2, 1, 5, 2, 8)), jnp.float32)
    frequencies = rope_frequencies(8)
    positions = jnp.array([[0, 1, 5, 9, 30]])

    def products(shift):
        rotated = (rotate(x, positions + shift, frequencies) for x in (query, key))
        return jnp.einsum("BTNH,BSNH->BNTS", *rotated)

    np.testing.assert_allclose(products(0), products(711), atol=1e-3)
    at_equal_positions = jnp.einsum("BTNH,BTNH->BNT", query, key)
    np.testing.assert_allclose(jnp.diagonal(products(711), axis1=2, axis2=3), at_equal_positions, atol=1e-4)


def test_scaled_frequencies():
    plain = rope_frequencies(64)
    np.testing.assert_allclose(rope_frequencies(64, scaling="linear", factor=4.0), plain / 4)
    yarn = rope_frequencies(64, scaling="yarn", factor=4.0, original_length=2048)
    turns = 2048 * plain / (2 * math.pi)
    np.testing.assert_allclose(yarn[turns > 32], plain[turns > 32])
    np.testing.assert_allclose(yarn[turns < 1], plain[turns < 1] / 4)
    between = (turns > 1) & (turns < 32)
    assert between.sum() > 5 and (turns > 32).any() and (turns < 1).any()
    kept = (turns[between] - 1) / 31
    np.testing.assert_allclose(yarn[between], plain[between] * (kept + (1 - kept) / 4))
    assert yarn_logit_factor(1.0) == 1
    assert math.isclose(yarn_logit_factor(math.e**10), 4)


def test_alibi_slopes():
    np.testing.assert_allclose(alibi_slopes(8), 0.5 ** np.arange(1, 9))
    np.testing.assert_allclose(alibi_slopes(6), [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8])


@pytest.mark.parametrize("num_kv_heads", [1, 3])
def test_alibi_features_add_the_bias(num_kv_heads):
    scale, num_heads = 0.3, 6
    query = jnp.asarray(rng.standard_normal((2, 9, num_heads, 4)), jnp.float32)
    key = jnp.asarray(rng.standard_normal((2, 9, num_kv_heads, 4)), jnp.float32)
    positions = jnp.asarray(np.sort(rng.integers(0, 3000, (2, 9))))

    def logits(query, key):
        key = jnp.repeat(key, num_heads // num_kv_heads, axis=2)
        return scale * jnp.einsum("BTNH,BSNH->BNTS", query, key, preferred_element_type=jnp.float32)

    added = logits(*with_alibi(query, key, positions, scale)) - logits(query, key)
    distance = positions[:, None, :, None] - positions[:, None, None, :]
    slopes = alibi_slopes(num_heads)[:, None, None]
    np.testing.assert_allclose(added, -slopes * distance, atol=2e-3)

    # In bfloat16 the slope is rounded, and no position is: differences between keys are those of one slope.
    query, key = jnp.zeros_like(query, jnp.bfloat16), jnp.zeros_like(key, jnp.bfloat16)
    added = logits(*with_alibi(query, key, positions, scale))
    assert with_alibi(query, key, positions, scale)[0].dtype == jnp.bfloat16
    rounded = scale * np.asarray(jnp.asarray(slopes / scale, jnp.bfloat16), np.float64)
    expected = -rounded * np.asarray(distance)
    np.testing.assert_allclose(added - added[..., :1], expected - expected[..., :1], atol=2e-3)
    np.testing.assert_allclose(added, expected, atol=2e-2)
    assert jax.eval_shape(with_alibi, query, key, positions, scale)[1].shape == (2, 9, num_kv_heads, 8)
