"""The decoder with a cache gives the logits that it gives without one."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import attnorm
from attnorm.models.gpt import GPT, GPTConfig
from tests.models.test_gpt import CONFIGS, SIZES, TOKENS, V, make
from tests.test_decoding import NAMES, first_of_each_kind, rule

ROOT = Path(__file__).parents[2]
T = TOKENS.shape[1]
# How many tokens enter at once, and how many of them count in each row.
PARTS = [(4, [4, 2]), (4, [3, 4]), (4, [1, 2]), (1, [1, 1])]


def causal(normalizer, window=None):
    """The attention function without a cache."""
    return functools.partial(
        attnorm.dot_product_attention,
        normalizer=normalizer,
        is_causal=True,
        local_window_size=None if window is None else (window, 0),
        implementation="reference",
    )


def over_cache(normalizer, window=None):
    """The attention function for the cache."""
    options = {"normalizer": normalizer, "implementation": "reference"}
    if window is not None:
        return functools.partial(attnorm.windowed_attention, **options)
    return functools.partial(attnorm.dot_product_attention, is_causal=True, **options)


def compiled(model, attention_fn):
    """``decode`` as one would run it, with the cache donated."""
    graph, params = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=1)
    def decode(tokens, cache, num_tokens):
        return nnx.merge(graph, params).decode(tokens, cache, attention_fn, num_tokens)

    return decode


def in_parts(decode, cache, parts):
    """Logits of all tokens, which enter the cache in parts as PARTS has them."""
    logits = np.full((2, T, V), np.nan, np.float32)
    seen = np.zeros(2, int)
    for width, counts in parts:
        tokens = np.full((2, width), V - 1)  # what is padding is a token like others
        for row, count in enumerate(counts):
            tokens[row, :count] = TOKENS[row, seen[row] : seen[row] + count]
        made, cache = decode(jnp.asarray(tokens), cache, jnp.asarray(counts))
        for row, count in enumerate(counts):
            logits[row, seen[row] : seen[row] + count] = made[row, :count]
        seen += np.array(counts)
    np.testing.assert_array_equal(cache.lengths, seen)
    return logits, cache


def assert_near(got, expected):
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.max(np.abs(expected)), rtol=0)


@pytest.mark.parametrize(
    "config, normalizer, window",
    [
        (CONFIGS["modern"], "ssmax", 3),
        (CONFIGS["alibi"], "l2", None),
        ({"output_norm": "global_layer", "scan_layers": False, "max_length": T}, "softmax", None),
    ],
    ids=["modern", "alibi", "learned"],
)
def test_equals_the_logits_without_a_cache(config, normalizer, window):
    model = make(**config)
    cache = model.make_cache(2, T if window is None else window + 4, window=window)
    decode = compiled(model, over_cache(normalizer, window))
    logits, after = in_parts(decode, cache, PARTS)
    assert_near(logits, jax.jit(lambda tokens: model(tokens, causal(normalizer, window)))(TOKENS))
    assert cache.key.is_deleted()
    if window is None:  # a token too many, which only the traced program does not see
        with pytest.raises(
            ValueError, match="rows may have max_length = 9 tokens, row 0 has 9 and would have 10"
        ):
            model.decode(TOKENS[:, :1], after, over_cache(normalizer))
        stored = np.asarray(after.key)
        made, after = decode(TOKENS[:, :1], after, jnp.array([1, 1]))
        assert np.all(np.isfinite(made)) and np.all(after.lengths == 10)
        np.testing.assert_array_equal(after.key, stored)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_normalizer(name):
    """Not compiled: operations of the same shapes are shared by the normalisers."""
    check_operations(name, window=None)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_of_each_kind(NAMES))
def test_every_kind_of_normalizer_in_a_window(name):
    check_operations(name, window=3)


def check_operations(name, window):
    model, tokens_at_once = small_model(), 6
    attention_fn = over_cache(rule(name), window)
    cache = model.make_cache(2, T if window is None else window + tokens_at_once, window=window)

    def decode(tokens, cache, num_tokens):
        return model.decode(tokens, cache, attention_fn, num_tokens)

    parts = [(tokens_at_once, [6, 4]), (tokens_at_once, [3, 5])]
    logits, _ = in_parts(decode, cache, parts)
    assert_near(logits, model(TOKENS, causal(rule(name), window)))


@functools.cache
def small_model():
    return make(position="rope", num_layers=1, num_key_value_heads=2, qk_norm=True, scan_layers=False)


def test_heads_that_learn_their_normalizer_and_a_split_cache():
    def attention_fn(query, key, value, *, learned, **options):
        normalizer = attnorm.get_normalizer("sink", b=learned["b"])
        return attnorm.split_attention(query, key, value, normalizer=normalizer, num_parts=3, **options)

    def without_cache(query, key, value, *, learned, **options):
        normalizer = attnorm.get_normalizer("sink", b=learned["b"])
        return attnorm.dot_product_attention(
            query, key, value, normalizer=normalizer, is_causal=True, **options
        )

    config = GPTConfig(**SIZES, position="rope", num_key_value_heads=1)
    model = GPT(config, learned={"b": 1.5}, rngs=nnx.Rngs(0))
    logits, _ = in_parts(compiled(model, attention_fn), model.make_cache(2, 12), [(T, [T, T])])
    assert_near(logits, jax.jit(lambda: model(TOKENS, without_cache))())


def test_generates_what_repeated_passes_would():
    model = make(position="rope", num_layers=1, num_key_value_heads=2)
    graph, params = nnx.split(model)
    attention_fn = over_cache("l2")

    def decode(params, tokens, cache, num_tokens):
        return nnx.merge(graph, params).decode_last(tokens, cache, attention_fn, num_tokens)

    lengths = np.array([5, 2])
    out = attnorm.generate(
        decode, params, model.make_cache(2, T), TOKENS[:, :5], max_new_tokens=4, prompt_lengths=lengths
    )
    tokens = np.array(TOKENS)
    without_cache = jax.jit(lambda tokens: model(tokens, attention_fn))
    for step in range(4):
        logits = without_cache(tokens)
        for row, length in enumerate(lengths + step):
            tokens[row, length] = np.argmax(logits[row, length - 1])
            assert out.tokens[row, step] == tokens[row, length]


# Bad input.


@pytest.mark.parametrize(
    "error, tokens, num_tokens, message",
    [
        (ValueError, TOKENS[:, :0], None, r"the cache's B = 2 and T > 0, got \(2, 0\)"),
        (
            ValueError,
            TOKENS[:1],
            None,
            r"tokens must have shape \(B, T\), with the cache's B = 2 .* got \(1, 9\)",
        ),
        (TypeError, TOKENS[:, :2] * 1.0, None, "tokens must hold integers, got float32"),
        (ValueError, TOKENS[:, :5], None, "at most 4 can be appended at once to a cache of 4 slots, got 5"),
        (ValueError, TOKENS[:, :2], np.array([1, 3]), r"num_tokens must be from 0 to 2, got \[1, 3\]"),
        (ValueError, TOKENS[:, :2] + V, None, f"tokens must be from 0 to {V - 1}, of a vocabulary of {V}"),
    ],
)
def test_tokens_that_do_not_fit(error, tokens, num_tokens, message):
    model = make()
    with pytest.raises(error, match=message):
        model.decode(tokens, model.make_cache(2, 4), over_cache("l2"), num_tokens)


def test_caches_that_do_not_fit():
    model = make()
    with pytest.raises(ValueError, match="num_slots must be at most max_length = 16, got 17"):
        model.make_cache(1, 17)
    assert model.make_cache(1, 8, window=4).max_length == 16
    with pytest.raises(
        ValueError, match="cache must have this model's sizes .*'num_layers': 2.* got .*'num_layers': 1"
    ):
        model.decode(TOKENS, make(num_layers=1).make_cache(2, 16), over_cache("l2"))
    with pytest.raises(
        TypeError, match="unexpected keyword argument 'window'"
    ):  # else the slots would be misread
        model.decode(TOKENS[:, :2], model.make_cache(2, 8, window=4), over_cache("l2"))


# A cache over several devices.

_SPLIT_OVER_DEVICES = """
import dataclasses, functools
import jax, jax.numpy as jnp, numpy as np
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import attnorm
from attnorm.hlo import collectives
from attnorm.models.gpt import GPT, GPTConfig

config = GPTConfig(
    vocab_size=32, max_length=64, num_layers=2, num_heads=4, num_key_value_heads=2, features=32, position="rope"
)
model = GPT(config, rngs=nnx.Rngs(0))
graph, params = nnx.split(model)
options = dict(normalizer="ssmax", precision="highest")
split = functools.partial(attnorm.split_attention, num_parts=4, **options)
causal = functools.partial(attnorm.dot_product_attention, is_causal=True, **options)
tokens = jax.random.randint(jax.random.key(0), (2, 64), 0, 32)

mesh = jax.make_mesh((4,), ("context",), axis_types=(AxisType.Auto,))
whole, slots = NamedSharding(mesh, P()), NamedSharding(mesh, P(None, None, "context"))
cache = model.make_cache(2, 64)
cache = dataclasses.replace(
    cache,
    key=jax.device_put(cache.key, slots),
    value=jax.device_put(cache.value, slots),
    lengths=jax.device_put(cache.lengths, whole),
)
params = jax.device_put(params, whole)

@functools.partial(jax.jit, donate_argnums=2)
def decode(params, tokens, cache):
    return nnx.merge(graph, params).decode(tokens, cache, split)

made = []
for start in range(0, 64, 32):
    chunk = tokens[:, start : start + 32]
    logits, cache = decode(params, chunk, cache)
    made.append(logits)
np.testing.assert_allclose(jnp.concatenate(made, axis=1), jax.jit(lambda: model(tokens, causal))(), atol=1e-5)
assert cache.key.sharding.spec == slots.spec

# A few tokens after many: what devices send is smaller than the keys of one layer.
B, T, S, K, H = 2, 4, 1024, 2, 8
cache = model.make_cache(B, S)
places = dataclasses.replace(cache, key=slots, value=slots, lengths=whole)
cache = jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), cache, places)
program = decode.lower(params, tokens[:, :T], cache).compile()
sent = collectives(program.as_text())
assert 0 < max(one.bytes for one in sent) < B * S * K * H * 4, sent
"""


@pytest.mark.slow
def test_slots_that_are_sharded_over_devices_stay_there():
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    subprocess.run([sys.executable, "-c", _SPLIT_OVER_DEVICES], env=environment, cwd=ROOT, check=True)
