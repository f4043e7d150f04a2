"""The counting transformer: its size, its embedding's gradient, and what its outputs may depend on."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnorm.data.counting import counting_batch
from attnorm.models.counting import CountingTransformer, FrequencyScaledEmbedding

attention_fn = functools.partial(jax.nn.dot_product_attention, is_causal=True)


def make(norm="layer", num_blocks=2):
    return CountingTransformer(
        8, features=16, num_heads=2, num_blocks=num_blocks, norm=norm, rngs=nnx.Rngs(0)
    )


def test_published_size():
    model = nnx.eval_shape(
        lambda: CountingTransformer(
            32, features=384, num_heads=8, num_blocks=8, norm="batch", rngs=nnx.Rngs(0)
        )
    )
    num_params = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    block = 384 * 4 * 384 + 4 * 384 + 2 * 384 * 384 + 2 * 384
    assert num_params == 8 * block + (32 + 2) * 384 + 2 * 384 + 384 + 1
    assert round(num_params / 1e6, 2) == 7.11


def test_embedding_gradient_is_divided_by_frequency_and_its_value_is_exact():
    embedding = FrequencyScaledEmbedding(4, 3, rngs=nnx.Rngs(0))
    tokens = jnp.array([[0, 1, 1, 1], [0, 1, 2, 1]])  # frequencies 2/8, 5/8, 1/8, 0
    np.testing.assert_array_equal(embedding(tokens), embedding.table[...][tokens])
    cotangent = jax.random.normal(jax.random.key(1), (2, 4, 3))
    gradient = nnx.grad(lambda embedding: jnp.sum(embedding(tokens) * cotangent))(embedding).table[...]
    expected = np.zeros((4, 3))
    for token, frequency in ((0, 2 / 8), (1, 5 / 8), (2, 1 / 8)):
        expected[token] = np.asarray(cotangent)[np.asarray(tokens) == token].sum(axis=0) / frequency
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_initial_scales():
    model = CountingTransformer(512, features=256, num_heads=2, num_blocks=1, norm="layer", rngs=nnx.Rngs(0))
    np.testing.assert_allclose(jnp.std(model.token_embedding.table[...]), 0.25 / 16, rtol=0.02)
    np.testing.assert_allclose(jnp.std(model.head.kernel[...]), 0.5 / 16, rtol=0.2)


def test_outputs_depend_on_no_later_token_and_on_position_0_by_its_mark_alone():
    model = make()
    tokens, _ = counting_batch(jax.random.key(0), 2, 12, 8)
    out = model(tokens, attention_fn)
    changed = model(tokens.at[:, 7].set((tokens[:, 7] + 1) % 8), attention_fn)
    np.testing.assert_allclose(changed[:, :7], out[:, :7], atol=1e-6)
    assert jnp.all(changed[:, 7] != out[:, 7])
    # No other position is marked: to the last one of a single block, the order of the others is nothing.
    model = make(num_blocks=1)
    out = model(tokens, attention_fn)
    permuted = model(tokens.at[:, 1:11].set(tokens[:, 10:0:-1]), attention_fn)
    np.testing.assert_allclose(permuted[:, -1], out[:, -1], atol=1e-5)
    swapped = model(tokens.at[:, 0].set(tokens[:, 1]).at[:, 1].set(tokens[:, 0]), attention_fn)
    assert jnp.max(jnp.abs(swapped[:, -1] - out[:, -1])) > 1e-3


def test_block_is_the_stated_formula():
    model = make()
    block = model.blocks[0]
    x = jax.random.normal(jax.random.key(0), (2, 5, 16))
    normed = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-6)
    query, key, value, pre = jnp.split(normed @ block.project_in.kernel[...], 4, axis=-1)
    heads = (y.reshape(2, 5, 2, 8) for y in (query, key, value))
    attended = attention_fn(*heads).reshape(2, 5, 16)
    expected = x + jnp.concatenate([jax.nn.gelu(pre), attended], -1) @ block.project_out.kernel[...]
    np.testing.assert_allclose(block(x, attention_fn), expected, atol=1e-5)


def test_batch_norm_uses_the_batch_in_training_and_running_statistics_in_evaluation():
    model = make("batch")
    tokens, _ = counting_batch(jax.random.key(0), 4, 12, 8)
    before = model.norm.mean[...]
    together = model(tokens, attention_fn)
    assert jnp.max(jnp.abs(together[:2] - model(tokens[:2], attention_fn))) > 1e-3
    assert jnp.any(model.norm.mean[...] != before)
    model.eval()
    running = model.norm.mean[...]
    together = model(tokens, attention_fn)
    np.testing.assert_allclose(together[:2], model(tokens[:2], attention_fn), atol=1e-5)
    np.testing.assert_array_equal(model.norm.mean[...], running)


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="norm must be one of layer, batch, got 'group'"):
        make("group")
    with pytest.raises(ValueError, match="features must be a multiple of num_heads, got 10 and 4"):
        CountingTransformer(4, features=10, num_heads=4, num_blocks=1, norm="layer", rngs=nnx.Rngs(0))
