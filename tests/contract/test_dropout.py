"""Dropout of the normalised weights: deterministic, mean-preserving, the same mask forward and backward."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm import chunked
from tests.contract.helpers import assert_near, make_arrays

RATE = 0.3


def dropped(attend, *arrays, seed=0, rate=RATE, **options):
    return attend(*arrays, dropout_rate=rate, dropout_rng=jax.random.key(seed), **options)


def effective_weights(attend, query, key, **options):
    """The weights after dropout (B, N, T, S), read off with one-hot values."""
    S, K = key.shape[1:3]
    value = np.broadcast_to(np.eye(S, dtype=np.float32)[None, :, None], (key.shape[0], S, K, S))
    return np.moveaxis(
        np.asarray(jax.jit(lambda *x: dropped(attend, *x, **options))(query, key, value)), 2, 1
    )


def test_weights_are_dropped_or_scaled_up(attend):
    query, key, _ = make_arrays()
    weights = effective_weights(attend, query, key, is_causal=True)
    dense = np.asarray(attnorm.attention_weights(query, key, is_causal=True, precision="highest"))
    kept = weights != 0
    np.testing.assert_allclose(weights[kept], dense[kept] / (1 - RATE), rtol=1e-5)
    visible = dense > 0
    drawn = kept[visible]
    assert abs(drawn.mean() - (1 - RATE)) < 5 * np.sqrt(RATE * (1 - RATE) / drawn.size)


def test_the_mask_is_independent_across_every_axis(attend):
    query, key, _ = make_arrays(B=4, N=4)
    kept = effective_weights(attend, query, key) != 0
    centred = kept - (1 - RATE)
    variance = RATE * (1 - RATE)
    assert abs(centred.mean()) < 5 * np.sqrt(variance / centred.size)
    for axis in range(4):
        neighbours = (centred * np.roll(centred, 1, axis)).mean() / variance
        assert abs(neighbours) < 5 / np.sqrt(centred.size), axis
        along = centred.mean(axis)  # no row, column, head or entry is treated alike
        assert np.abs(along).max() < 6 * np.sqrt(variance / centred.shape[axis]), axis


def test_the_key_decides(attend):
    arrays = make_arrays()
    first, again, other = (jax.jit(lambda *x, s=s: dropped(attend, *x, seed=s))(*arrays) for s in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).mean() > 0.1


def test_old_style_keys_serve_as_well(attend):
    arrays = make_arrays()
    new = attend(*arrays, dropout_rate=RATE, dropout_rng=jax.random.key(3))
    old = attend(*arrays, dropout_rate=RATE, dropout_rng=jax.random.PRNGKey(3))
    np.testing.assert_array_equal(new, old)


def test_a_rate_of_zero_is_no_dropout(attend):
    arrays = make_arrays()
    np.testing.assert_array_equal(dropped(attend, *arrays, rate=0.0), attend(*arrays))


def test_the_mean_over_keys_is_the_output_without_dropout(attend):
    query, key, value = make_arrays(B=1, T=10, S=20)
    keys = jax.random.split(jax.random.key(0), 2000)
    many = jax.jit(jax.vmap(lambda rng: attend(query, key, value, dropout_rate=RATE, dropout_rng=rng)))(keys)
    error = many.mean(0) - attend(query, key, value)
    assert (np.abs(error) < 6 * many.std(0) / np.sqrt(len(keys))).all()


@pytest.mark.parametrize("normalizer", ["softmax", "l2", "sink", "affine", "softplus"])
def test_the_gradient_has_the_forward_mask(attend, normalizer):
    """The loss is linear in the values and smooth in the rest, if the mask does not move."""
    query, key, value = make_arrays(B=1, T=20, S=30)
    rng = np.random.default_rng(1)
    d_output = rng.normal(size=query.shape).astype(np.float32)

    @jax.jit
    def loss(query, key, value):
        output = dropped(attend, query, key, value, normalizer=normalizer, is_causal=True, query_offset=6)
        return jnp.vdot(output, d_output)

    gradients = jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value)
    np.testing.assert_allclose(jnp.vdot(gradients[2], value), loss(query, key, value), rtol=1e-5)
    arrays = (query, key, value)
    for k, step in ((0, 1e-2), (1, 1e-2), (2, 1.0)):
        direction = rng.normal(size=arrays[k].shape).astype(np.float32)
        moved = [loss(*arrays[:k], arrays[k] + sign * step * direction, *arrays[k + 1 :]) for sign in (1, -1)]
        slope = (moved[0] - moved[1]) / (2 * step)
        np.testing.assert_allclose(jnp.vdot(gradients[k], direction), slope, rtol=5e-3)


def test_the_mask_does_not_depend_on_the_tiles():
    query, key, value = make_arrays()

    def with_blocks(*sizes):
        with chunked.block_sizes(chunked.BlockSizes(*sizes)):
            return dropped(attnorm.dot_product_attention, query, key, value, implementation="chunked")

    expected = with_blocks(64, 64)
    for sizes in ((16, 24), (24, 8)):
        assert_near("output", with_blocks(*sizes), expected, 2e-6)


def test_the_log_norm_is_that_of_the_weights_before_dropout(attend):
    arrays = make_arrays()
    _, expected = attend(*arrays, return_log_norm=True)
    _, got = dropped(attend, *arrays, return_log_norm=True)
    np.testing.assert_array_equal(got, expected)
