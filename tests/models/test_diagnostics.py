"""Diagnostics against weights that are known, and against their formulas in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnorm import dot_product_attention, get_normalizer
from attnorm.models.diagnostics import attention_diagnostics
from attnorm.models.gpt import GPT, GPTConfig

SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2], [1, 2, 2, 2, 2, 2, 2]])
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2], [0, 0, 1, 2, 3, 4, 5]])
TOKENS = np.random.default_rng(0).integers(0, 11, (2, 7))
VISIBLE = np.tri(7, dtype=bool) & (SEGMENTS[:, :, None] == SEGMENTS[:, None])


@pytest.fixture(scope="module")
def model():
    config = GPTConfig(
        vocab_size=11, max_length=8, num_layers=2, num_heads=4, num_key_value_heads=2, features=16,
        position="rope", attention_soft_cap=2.0,
    )  # fmt: skip
    model = GPT(config, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model)
    return nnx.merge(graph, jax.tree.map(lambda x: 12 * x, params))


def diagnosed(model, normalizer, seen=None):
    def attention_fn(query, key, value, **options):
        if seen is not None:
            jax.debug.callback(lambda *x: seen.append(x), query, key, value, ordered=True)
        return dot_product_attention(
            query, key, value, normalizer=normalizer, is_causal=True,
            query_segment_ids=SEGMENTS, key_value_segment_ids=SEGMENTS, **options,
        )  # fmt: skip

    arrays = (jnp.asarray(x) for x in (TOKENS, POSITIONS, SEGMENTS))
    tokens, positions, segment_ids = arrays
    found = jax.jit(functools.partial(attention_diagnostics, model, attention_fn=attention_fn))(
        tokens=tokens, positions=positions, segment_ids=segment_ids
    )
    jax.effects_barrier()
    return {name: np.asarray(x) for name, x in found.items()}


def test_equal_weights_have_known_numbers(model):
    """With queries of 0 every key that is seen has the same weight."""
    graph, params = nnx.split(model)
    flat = nnx.merge(graph, params)
    flat.blocks.attention.query.kernel[...] = jnp.zeros_like(flat.blocks.attention.query.kernel[...])
    flat.blocks.attention.query.bias[...] = jnp.zeros_like(flat.blocks.attention.query.bias[...])
    counts = VISIBLE.sum(-1)
    for p in (1.0, 2.0):
        found = diagnosed(flat, get_normalizer("lp", p=p))
        for name, expected in {
            "weight_norm": np.mean(counts ** (0.5 - 1 / p)),
            "effective_keys": np.mean(counts),
            "entropy": np.mean(np.log(counts)),
            "max_logit": 0,
        }.items():
            np.testing.assert_allclose(found[name], [expected, expected], rtol=1e-5, atol=1e-6)


def test_numbers_are_those_of_their_formulas(model):
    seen = []
    found = diagnosed(model, "l2", seen)
    calls = [np.asarray(x, np.float64) for call in seen for x in call]
    # Two calls a layer: for the output, and for the weights, which has wider values.
    by_layer = [calls[i : i + 3] for i in range(0, len(calls), 3) if calls[i + 2].shape[-1] == 4]
    assert len(by_layer) == 2
    for layer, (query, key, value) in enumerate(by_layer):
        key, value = (np.repeat(x, 2, axis=2) for x in (key, value))
        logits = np.einsum("btnh,bsnh->bnts", query, key) / 2
        logits = 2 * np.tanh(logits / 2)
        shown = np.where(VISIBLE[:, None], logits, -np.inf)
        weights = np.exp(shown - shown.max(-1, keepdims=True))
        weights /= np.linalg.norm(weights, axis=-1, keepdims=True)
        share = weights / weights.sum(-1, keepdims=True)
        output = np.einsum("bnts,bsnh->btnh", weights, value)
        for name, expected in {
            "weight_norm": 1,
            "effective_keys": np.mean(weights.sum(-1) ** 2),
            "entropy": -np.mean(np.sum(share * np.log(np.where(share > 0, share, 1)), -1)),
            "output_variance": np.mean(output.var(-1)),
            "max_logit": shown.max(),
        }.items():
            np.testing.assert_allclose(found[name][layer], expected, rtol=2e-5)
