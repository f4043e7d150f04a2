"""attention_fn inside linen's and nnx's own attention modules, against their own attention."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import attnorm
from attnorm.flax_adapter import attention_fn

B, T, N, F = 2, 12, 4, 32


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def assert_close(actual, expected, atol=2e-6):
    assert actual.dtype == expected.dtype
    np.testing.assert_allclose(*(np.asarray(x, np.float32) for x in (actual, expected)), atol=atol, rtol=0)


def linen_pair(adapter, **options):
    """A function of (x, ...) with linen's own attention and one with the adapter, on the same parameters."""
    layer = linen.MultiHeadDotProductAttention(num_heads=N, **options)
    params = layer.clone(dropout_rate=0.0).init(jax.random.key(1), jnp.ones((1, 2, F)))
    return [functools.partial(m.apply, params) for m in (layer, layer.clone(attention_fn=adapter))]


def nnx_pair(adapter, **options):
    options = dict(decode=False) | options
    own = nnx.MultiHeadAttention(N, F, rngs=nnx.Rngs(1), **options)
    return [own, nnx.MultiHeadAttention(N, F, rngs=nnx.Rngs(1), attention_fn=adapter, **options)]


# What the modules pass.


class Everything(inspect.Signature):
    """A signature in which linen finds every keyword that it looks for."""

    @property
    def parameters(self):
        return type("Contains", (), {"__contains__": lambda self, name: True})()


def test_signature_names_every_keyword_that_the_modules_pass():
    passed = set()

    def record(query, key, value, **keywords):
        passed.update(keywords)
        return query

    record.__signature__ = Everything()
    x = normal(B, T, F)
    linen.MultiHeadDotProductAttention(num_heads=N, attention_fn=record).init(
        jax.random.key(0), x, sow_weights=True
    )
    assert {"mask", "dropout_rng", "deterministic", "dtype", "module"} <= passed
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    layer = nnx.MultiHeadAttention(N, F, attention_fn=record, decode=False, rngs=nnx.Rngs(0))
    has_positions = "input_positions" in inspect.signature(layer.__call__).parameters
    layer(x, **(dict(input_positions=positions) if has_positions else {}))
    assert "is_causal" in passed
    assert passed <= set(inspect.signature(attention_fn()).parameters)


@pytest.mark.parametrize("call", [linen_pair, nnx_pair])
def test_the_mask_is_not_lost(call):
    _, layer = call(attention_fn("l2"))
    x = normal(B, T, F)
    changed = x.at[:, -1].add(1.0)
    mask = linen.make_causal_mask(x[..., 0])
    masked, masked_changed = layer(x, mask=mask), layer(changed, mask=mask)
    np.testing.assert_array_equal(masked[:, :-1], masked_changed[:, :-1])
    assert np.all(np.any(layer(x)[:, :-1] != layer(changed)[:, :-1], axis=-1))


# Softmax equals Flax's own attention.


def padding_and_causal():
    visible = jnp.arange(T) < jnp.array([[T], [5]])
    return linen.combine_masks(
        linen.make_causal_mask(jnp.ones((B, T))), linen.make_attention_mask(jnp.ones((B, T)), visible)
    )


MASKS = {
    "none": lambda: None,
    "float": padding_and_causal,
    "bool": lambda: padding_and_causal().astype(bool),
    "shared": lambda: linen.make_causal_mask(jnp.ones((1, T))),
    "per head": lambda: (jnp.arange(T) % 5 != jnp.arange(N)[:, None])[None, :, None, :],
}


@pytest.mark.parametrize("mask", MASKS)
def test_softmax_equals_linen(mask):
    own, ours = linen_pair(attention_fn("softmax"))
    x, mask = normal(B, T, F), MASKS[mask]()
    assert_close(ours(x, mask=mask), own(x, mask=mask))


@pytest.mark.parametrize("mask", ["none", "float"])
def test_softmax_equals_nnx(mask):
    own, ours = nnx_pair(attention_fn("softmax"), num_kv_heads=2)
    x, mask = normal(B, T, F), MASKS[mask]()
    assert_close(ours(x, mask=mask), own(x, mask=mask))


def test_gradients_of_softmax_equal_those_of_linen():
    x, mask, cotangent = normal(B, T, F), padding_and_causal(), normal(B, T, F, seed=1)
    expected, actual = (
        jax.jit(jax.grad(lambda x, apply=apply: jnp.vdot(apply(x, mask=mask), cotangent)))(x)
        for apply in linen_pair(attention_fn("softmax"))
    )
    assert_close(actual, expected, atol=1e-5)


@pytest.mark.parametrize("call", [linen_pair, nnx_pair])
def test_two_batch_dimensions(call):
    own, ours = call(attention_fn("softmax"))
    x = normal(2, 3, T, F)
    mask = jnp.arange(T) < jnp.arange(2, 8).reshape(2, 3, 1, 1, 1)
    mask = jnp.broadcast_to(mask, (2, 3, 1, T, T)).astype(jnp.float32)
    assert_close(ours(x, mask=mask), own(x, mask=mask))


@pytest.mark.parametrize("mask_shape", [(T, T), (1, T, T), (1, 1, 1, T, T), (2, 1, 1, T, T), (2, 3, N, T, 1)])
def test_masks_broadcast_over_two_batch_dimensions(mask_shape):
    query, key, value = normal(3, 2, 3, T, N, 8)
    mask = (normal(*mask_shape, seed=1) > 0).at[..., 0, :].set(True)
    full = jnp.broadcast_to(mask, (2, 3, N, T, T)).reshape(6, N, T, T)
    expected = attnorm.dot_product_attention(*(x.reshape(6, T, N, 8) for x in (query, key, value)), mask=full)
    assert_close(attention_fn("l2")(query, key, value, mask=mask), expected.reshape(query.shape))


def test_no_batch_dimension():
    query, key, value = normal(3, T, N, 8)
    mask = jnp.tril(jnp.ones((1, T, T)))
    expected = attnorm.dot_product_attention(query[None], key[None], value[None], is_causal=True)[0]
    assert_close(attention_fn("l2")(query, key, value, mask=mask), expected)


@pytest.mark.parametrize("call", [linen_pair, nnx_pair])
def test_bfloat16(call):
    own, ours = call(attention_fn("softmax"), dtype=jnp.bfloat16)
    x, mask = normal(B, T, F), padding_and_causal()
    assert_close(ours(x, mask=mask), own(x, mask=mask), atol=0.03)
    assert ours(x, mask=mask).dtype == jnp.bfloat16


def test_dtype_is_promoted_and_can_be_set():
    query, key, value = normal(3, B, T, N, 8)
    attention = attention_fn("l2", implementation="reference")
    mixed = attention(query, key.astype(jnp.bfloat16), value.astype(jnp.float16))
    expected = attention(
        query, *(x.astype(jnp.float32) for x in (key.astype(jnp.bfloat16), value.astype(jnp.float16)))
    )
    assert_close(mixed, expected, atol=0)
    lowered = attention(query, key, value, dtype=jnp.bfloat16)
    assert lowered.dtype == jnp.bfloat16
    assert_close(lowered, attention(*(x.astype(jnp.bfloat16) for x in (query, key, value))), atol=0)


@pytest.mark.parametrize("call", [linen_pair, nnx_pair])
def test_cross_attention(call):
    own, ours = call(attention_fn("softmax"))
    x, context = normal(B, T, F), normal(B, 7, F, seed=1)
    mask = linen.make_attention_mask(jnp.ones((B, T)), jnp.arange(7) < jnp.array([[7], [3]]))
    assert_close(ours(x, context, mask=mask), own(x, context, mask=mask))


def test_causal_argument_of_nnx_and_grouped_heads():
    own, ours = nnx_pair(attention_fn("softmax"), num_kv_heads=2)
    x = normal(B, T, F)
    mask = linen.make_attention_mask(jnp.ones((B, T)), jnp.arange(T) < jnp.array([[T], [5]]))
    assert_close(ours(x, is_causal=True), own(x, is_causal=True))
    assert_close(ours(x, mask=mask, is_causal=True), own(x, mask=mask, is_causal=True))


def test_causal_option_equals_the_mask():
    causal_mask = linen.make_causal_mask(jnp.ones((B, T)))
    own, ours = linen_pair(attention_fn("softmax", is_causal=True))
    x = normal(B, T, F)
    assert_close(ours(x), own(x, mask=causal_mask))


def test_query_that_sees_no_key_is_zero():
    query, key, value = normal(3, B, T, N, 8)
    out = attention_fn("softmax")(query, key, value, mask=jnp.ones((B, 1, T, 1)).at[0, 0, 3].set(0))
    np.testing.assert_array_equal(out[0, 3], jnp.zeros((N, 8)))
    assert np.all(np.any(out[1] != 0, axis=-1))


# Other normalisers.


@pytest.mark.parametrize("call", [linen_pair, nnx_pair])
def test_l2_equals_the_dense_weights_of_what_the_module_projects(call):
    seen = {}

    # functools.wraps hands on the signature, without which linen would drop the mask.
    adapter = attention_fn("l2", scale=0.5, logits_soft_cap=3.0, local_window_size=(4, 0))

    @functools.wraps(adapter.__call__)
    def spy(query, key, value, *args, **keywords):
        seen.update(query=query, key=key, value=value)
        seen["out"] = adapter(query, key, value, *args, **keywords)
        return seen["out"]

    _, ours = call(spy)
    mask = padding_and_causal()
    ours(normal(B, T, F), mask=mask)
    weights = attnorm.attention_weights(
        seen["query"],
        seen["key"],
        mask=mask.astype(bool),
        normalizer="l2",
        scale=0.5,
        logits_soft_cap=3.0,
        local_window_size=(4, 0),
    )
    norms = np.sum(np.asarray(weights, np.float64) ** 2, -1)
    sees_keys = (np.asarray(mask) * np.triu(np.ones((T, T)), -4)).any(-1)
    np.testing.assert_allclose(norms, np.broadcast_to(sees_keys, norms.shape), atol=1e-6)
    assert_close(seen["out"], jnp.einsum("bnts,bsnh->btnh", weights, seen["value"]))


def test_bias_is_added_to_the_logits():
    bias = normal(2, 3, N, T, T, seed=3)
    query, key, value = normal(3, 2, 3, T, N, 8)
    flat = [x.reshape(6, T, N, 8) for x in (query, key, value)]
    expected = attnorm.dot_product_attention(*flat, bias.reshape(6, N, T, T))
    assert_close(attention_fn("l2")(query, key, value, bias), expected.reshape(query.shape))


def test_learned_p_receives_its_gradient():
    query, key, value = normal(3, B, T, N, 8)
    p = jnp.array([1.0, 1.5, 2.0, 3.0])

    def loss(p, attention):
        return jnp.sum(attention(attnorm.get_normalizer("lp", p=p)) ** 2)

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    actual = gradient(p, lambda normalizer: attention_fn(normalizer)(query, key, value))
    expected = gradient(
        p, lambda normalizer: attnorm.dot_product_attention(query, key, value, normalizer=normalizer)
    )
    np.testing.assert_array_equal(actual, expected)
    assert np.all(actual != 0)


# Decoding.


@pytest.mark.parametrize("is_causal", [False, True])
def test_linen_decodes_step_by_step(is_causal):
    adapter = attention_fn("l2", is_causal=is_causal)
    x = normal(B, T, F)
    layer = linen.MultiHeadDotProductAttention(num_heads=N, attention_fn=adapter)
    decoder = layer.clone(decode=True)
    variables = decoder.init(jax.random.key(1), x)
    cache = {"cache": variables["cache"]}
    step = jax.jit(lambda cache, token: decoder.apply({**params, **cache}, token, mutable=["cache"]))
    params = {"params": variables["params"]}
    expected = layer.apply(params, x, mask=linen.make_causal_mask(x[..., 0]))
    for t in range(T):
        out, cache = step(cache, x[:, t : t + 1])
        assert_close(out[:, 0], expected[:, t], atol=1e-5)


@pytest.mark.parametrize("normalizer", ["softmax", "l2"])
def test_nnx_decodes_step_by_step(normalizer):
    x = normal(B, T, F)
    own, layer = nnx_pair(attention_fn(normalizer), num_kv_heads=2)
    layer.init_cache(x.shape)
    if normalizer == "softmax":
        expected = own(x, is_causal=True)
    else:
        expected = layer(x, is_causal=True, decode=False)
    step = nnx.jit(lambda layer, token: layer(token, decode=True, is_causal=True))
    for t in range(T):
        assert_close(step(layer, x[:, t : t + 1])[:, 0], expected[:, t], atol=1e-5)


# Dropout.


@pytest.mark.parametrize("call", [linen_pair, nnx_pair])
def test_deterministic_dropout_is_none(call):
    own, ours = call(attention_fn("softmax"), dropout_rate=0.4, deterministic=True)
    x = normal(B, T, F)
    assert_close(ours(x), own(x))


@pytest.mark.parametrize("broadcast_dropout", [False, True])
def test_modules_drop_when_training(broadcast_dropout):
    options = dict(dropout_rate=0.4, broadcast_dropout=broadcast_dropout)
    x = normal(B, T, F)
    _, layer = linen_pair(attention_fn("l2"), **options)
    drop = functools.partial(layer, x, deterministic=False)
    first = drop(rngs={"dropout": jax.random.key(2)})
    np.testing.assert_array_equal(first, drop(rngs={"dropout": jax.random.key(2)}))
    assert np.any(first != drop(rngs={"dropout": jax.random.key(3)}))
    _, layer = nnx_pair(attention_fn("l2"), **options)
    first, second = layer(x, deterministic=False), layer(x, deterministic=False)
    assert np.any(first != second) and np.any(first != layer(x, deterministic=True))


@pytest.mark.parametrize("broadcast_dropout", [False, True])
def test_dropout_multiplies_the_normalised_weights(broadcast_dropout):
    """With one-hot values the output is the weights, and so shows which of them were dropped."""
    rate, S = 0.25, T
    query, key = normal(B, S, N, 8), normal(B, S, 2, 8, seed=1)
    value = jnp.broadcast_to(jnp.eye(S)[:, None], (B, S, 2, S))
    bias = normal(1, N, S, S, seed=2)
    mask = jnp.arange(S) < jnp.array([S, 10])[:, None, None, None]
    normalizer = attnorm.get_normalizer("lp", p=jnp.array([1.0, 1.5, 2.0, 3.0]))
    out = attention_fn(normalizer)(
        query,
        key,
        value,
        bias,
        mask,
        broadcast_dropout=broadcast_dropout,
        dropout_rate=rate,
        dropout_rng=jax.random.key(5),
    )
    weights = attnorm.attention_weights(query, key, bias, mask, normalizer=normalizer)
    visible = np.broadcast_to(mask, weights.shape)
    factors = np.where(visible, np.swapaxes(out, 1, 2) / np.where(visible, weights, 1), np.nan)
    kept = factors > 0.5
    np.testing.assert_allclose(factors[kept], 1 / (1 - rate), rtol=1e-4)
    assert np.all(factors[visible & ~kept] == 0)
    pairs = kept[:, :, :, :10]
    assert pairs.mean() == pytest.approx(1 - rate, abs=0.1)
    if broadcast_dropout:
        assert np.all(pairs == pairs[0, 0])
    else:
        flat = pairs.reshape(B * N, -1)
        assert np.all([np.mean(a != b) > 0.2 for i, a in enumerate(flat) for b in flat[:i]])


# Weights for looking at.


def test_sown_weights_equal_those_of_flax():
    x, mask = normal(B, T, F), padding_and_causal()
    sown = [
        apply(x, mask=mask, sow_weights=True, mutable=["intermediates"])[1]["intermediates"][
            "attention_weights"
        ][0]
        for apply in linen_pair(attention_fn("softmax"))
    ]
    assert_close(sown[1], sown[0])
    sown = []
    for layer in nnx_pair(attention_fn("softmax")):
        layer(x, mask=mask, sow_weights=True)
        (weights,) = layer.attention_weights.get_value()
        sown.append(weights)
    assert sown[0].shape == (B, N, T, T)
    assert_close(sown[1], sown[0])


# What is refused.


def test_unknown_options_are_named_at_once():
    with pytest.raises(TypeError, match="'dropout_rat'"):
        attention_fn("l2", dropout_rat=0.1)
    with pytest.raises(ValueError, match="'l3'"):
        attention_fn("l3")
    with pytest.raises(TypeError, match="normalizer must be a name or a Normalizer"):
        attention_fn(attnorm.l2)


QKV = normal(3, B, T, N, 8)
REFUSED = {
    "einsum": (dict(qk_attn_weights_einsum=jnp.einsum), NotImplementedError, "qk_attn_weights_einsum"),
    "value einsum": (dict(attn_weights_value_einsum=jnp.einsum), NotImplementedError, ".*attn_weights_value"),
    "positions": (dict(input_positions=jnp.arange(T)), NotImplementedError, "input_positions"),
    "additive mask": (dict(mask=jnp.where(jnp.eye(T), 0.0, -jnp.inf)), ValueError, "mask must be boolean"),
    "mask of another batch": (
        dict(mask=jnp.ones((3, 1, T, T))),
        ValueError,
        "mask must broadcast to the batch",
    ),
    "mask of too many": (dict(mask=jnp.ones((2, B, 1, T, T))), ValueError, "mask must have at most"),
    "mask of another length": (dict(mask=jnp.ones((B, 1, T, T + 1))), ValueError, "mask"),
    "dropout without a key": (dict(dropout_rate=0.5), ValueError, "dropout_rng"),
    "dropout of all": (dict(dropout_rate=1.0, dropout_rng=jax.random.key(0)), ValueError, "dropout_rate"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_cannot_be_served(name):
    keywords, error, message = REFUSED[name]
    with pytest.raises(error, match=f"^{message}"):
        attention_fn("l2")(*QKV, **keywords)


def test_inputs_that_do_not_fit_each_other():
    query, key, value = QKV
    attention = attention_fn("l2")
    with pytest.raises(ValueError, match="^key must have query's batch dims"):
        attention(query, key[:1], value)
    three_heads = dict(dropout_rate=0.5, dropout_rng=jax.random.key(0))
    with pytest.raises(ValueError, match="^query heads N must be a multiple"):
        attention(query, key[:, :, :3], value[:, :, :3], **three_heads)


def test_local_window_in_decoding_is_refused():
    query, key, value = QKV
    with pytest.raises(NotImplementedError, match="^local_window_size in decoding"):
        attention_fn("l2", local_window_size=3)(query[:, :1], key, value, mask=jnp.ones((B, 1, 1, T)))


def test_equal_options_make_equal_adapters():
    """Else every rebuilt module would be compiled again."""
    adapters = [attention_fn("lp"), attention_fn(attnorm.get_normalizer("lp", p=2)), attention_fn("l2")]
    assert len(set(adapters)) == 1
    assert attention_fn("l2") != attention_fn("l2", is_causal=True) != attention_fn("softmax", is_causal=True)
