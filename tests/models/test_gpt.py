"""The decoder against its formulas in float64, and the ways to run it against each other.

GPT-2's own choices are compared with transformers in tests/models/pretrained.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from attnorm import dot_product_attention, get_normalizer
from attnorm.models.gpt import GPT, GPTConfig

V, T = 31, 9
SIZES = dict(vocab_size=V, max_length=16, num_layers=2, num_heads=4, features=24)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, V, (2, T)))


def attention_fn(p, **options):
    return functools.partial(
        dot_product_attention, normalizer=get_normalizer("lp", p=p), is_causal=True, **options
    )


def make(**options):
    """A model in which every parameter matters: none is at its initial 0 or 1."""
    graph, state = nnx.split(nnx.eval_shape(lambda: GPT(GPTConfig(**SIZES | options), rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(1)

    def fill(path, x):
        gain = path[-1].key == "scale"
        return jnp.asarray(gain + rng.normal(0, 0.25, x.shape), x.dtype)

    params = jax.tree_util.tree_map_with_path(fill, nnx.to_pure_dict(state))
    return nnx.merge(graph, nnx.State(params))


def run(model, tokens, attention_fn, *arguments):
    return jax.jit(lambda tokens: model(tokens, attention_fn, *arguments))(tokens)


# The formulas.


def oracle(model, tokens, p):
    """Logits in float64, one row and one head at a time; by the published formulas."""
    c = model.config
    params = jax.tree.map(lambda x: np.asarray(x, np.float64), nnx.to_pure_dict(nnx.state(model)))
    return np.stack([_row(c, params, np.asarray(row), p) for row in tokens])


def _row(c, params, tokens, p):
    x = params["token_embedding"]["embedding"][tokens]
    if c.position == "learned":
        x = x + params["position_embedding"]["embedding"][: len(tokens)]
    for i in range(c.num_layers):
        layer = jax.tree.map(lambda a: a[i], params["blocks"])  # noqa: B023
        x = x + _attention(c, layer["attention"], _norm(c, layer["attention_norm"], x), p)
        x = x + _mlp(c, layer["mlp"], _norm(c, layer["mlp_norm"], x))
    head = params["token_embedding"]["embedding"] if c.tie_embeddings else params["head"]
    return _cap(_norm(c, params["norm"], x) @ head.T, c.logits_soft_cap)


def _linear(layer, x):
    return x @ layer["kernel"] + layer.get("bias", 0)


def _norm(c, layer, x):
    if c.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + c.norm_eps) * layer["scale"] + layer.get("bias", 0)


def _cap(x, cap):
    return cap * np.tanh(x / cap) if cap else x


def _sigmoid(x):
    return 1 / (1 + np.exp(-x))


def _mlp(c, layer, x):
    hidden = _linear(layer["enter"], x)
    if c.mlp == "gelu":
        hidden = hidden / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
    elif c.mlp == "relu2":
        hidden = np.maximum(hidden, 0) ** 2
    else:
        gate = _linear(layer["gate"], x)
        hidden = gate * _sigmoid(gate) * hidden
    return _linear(layer["leave"], hidden)


def _turned(c, x):
    """One head's queries or keys, by complex numbers; with YaRN for a factor s and original length."""
    rotated = int(c.rope_fraction * x.shape[-1])
    frequency = c.rope_base ** (-np.arange(0, rotated, 2) / rotated)
    if c.rope_scaling == "yarn":
        kept = np.clip((c.rope_original_length * frequency / (2 * np.pi) - 1) / 31, 0, 1)
        frequency = frequency * (kept + (1 - kept) / c.rope_factor)
    z = x[:, : rotated // 2] + 1j * x[:, rotated // 2 : rotated]
    z = z * np.exp(1j * np.arange(len(x))[:, None] * frequency)
    return np.concatenate([z.real, z.imag, x[:, rotated:]], -1)


def _attention(c, layer, x, p):
    size = c.head_dim or c.features // c.num_heads
    queries, keys, values = (_linear(layer[name], x) for name in ("query", "key", "value"))
    heads = []
    for n in range(c.num_heads):
        shared = n // (c.num_heads // (c.num_key_value_heads or c.num_heads))
        query = queries[:, n * size : (n + 1) * size]
        key, value = (y[:, shared * size : (shared + 1) * size] for y in (keys, values))
        if c.qk_norm:
            query, key = (y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6) for y in (query, key))
        scale = c.attention_scale or size**-0.5
        if c.position == "rope":
            query, key = _turned(c, query), _turned(c, key)
            if c.rope_scaling == "yarn":
                scale *= (0.1 * np.log(c.rope_factor) + 1) ** 2
        logits = scale * query @ key.T
        if c.position == "alibi":
            logits -= 2.0 ** (-8 * (n + 1) / c.num_heads) * (np.arange(T)[:, None] - np.arange(T))
        terms = np.where(np.tri(T, dtype=bool), np.exp(_cap(logits, c.attention_soft_cap)), 0)
        heads.append(terms / (terms**p).sum(-1, keepdims=True) ** (1 / p) @ value)
    out = np.stack(heads, 1)
    axes = (1, 2) if c.output_norm == "global_layer" else (2,)
    if c.output_norm in ("head_layer", "global_layer"):
        out = out - out.mean(axes, keepdims=True)
    if c.output_norm != "none":
        eps = c.output_norm_eps or (1e-6 if c.output_norm == "head_rms" else 1e-5)
        out = out / np.sqrt((out**2).mean(axes, keepdims=True) + eps)
    if c.head_gate:
        out = out * _sigmoid(_linear(layer["gate"], x))[..., None]
    return _linear(layer["project"], out.reshape(len(x), -1))


CONFIGS = {
    "modern": dict(
        position="rope", rope_fraction=2 / 3, rope_base=100.0, rope_scaling="yarn", rope_factor=4.0,
        rope_original_length=40, qk_norm=True, mlp="swiglu", norm="rms", use_bias=False, num_key_value_heads=2,
        output_norm="head_rms", head_gate=True, tie_embeddings=False, attention_soft_cap=2.0, logits_soft_cap=3.0,
    ),
    "alibi": dict(position="alibi", mlp="relu2", output_norm="head_layer", num_key_value_heads=1),
    "no positions": dict(
        position="none", output_norm="global_layer", output_norm_eps=0.1, head_dim=10, attention_scale=0.5,
        mlp_features=20, norm_eps=1e-2, num_heads=3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name, p", [("modern", 2), ("alibi", 1), ("no positions", 2)])
def test_equals_the_formulas(name, p):
    model = make(**CONFIGS[name])
    expected = oracle(model, TOKENS, p)
    assert np.ptp(expected) > 2
    np.testing.assert_allclose(run(model, TOKENS, attention_fn(p)), expected, atol=2e-4)


def test_normalized_heads_are_the_same_for_every_p():
    """L_p weights differ from softmax by a factor a row, which a norm of each head removes, and one of all does not."""

    def logits(kind, p, eps=1e-12):
        return run(make(output_norm=kind, output_norm_eps=eps, num_layers=1), TOKENS, attention_fn(p))

    np.testing.assert_allclose(logits("head_rms", 2.0), logits("head_rms", 1.0), atol=2e-5)
    assert np.max(np.abs(logits("head_rms", 2.0, eps=0.1) - logits("head_rms", 1.0, eps=0.1))) > 1e-3
    assert np.max(np.abs(logits("global_layer", 2.0) - logits("global_layer", 1.0))) > 1e-3


def test_each_head_learns_its_own_normalizer():
    p = get_normalizer("lp", p=2.0).learned["p"]

    def learned_attention_fn(query, key, value, *, learned, **options):
        normalizer = get_normalizer("lp", p=p.value(learned["p"]))
        return dot_product_attention(query, key, value, normalizer=normalizer, is_causal=True, **options)

    config = GPTConfig(**SIZES, position="rope", qk_norm=True)
    model = GPT(config, learned={"p": dataclasses.replace(p, init=3.0).start()}, rngs=nnx.Rngs(0))

    graph, params = nnx.split(model)
    loss, gradients = jax.jit(
        jax.value_and_grad(lambda p: jnp.mean(nnx.merge(graph, p)(TOKENS, learned_attention_fn) ** 2))
    )(params)
    without, _ = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    fixed = nnx.to_pure_dict(params)
    del fixed["blocks"]["attention"]["learned"]
    fixed = nnx.merge(without, nnx.State(fixed))
    np.testing.assert_allclose(loss, jnp.mean(run(fixed, TOKENS, attention_fn(3.0)) ** 2), rtol=1e-6)
    gradient = gradients["blocks"]["attention"]["learned"]["p"][...]
    assert gradient.shape == (2, 4)
    assert np.all(np.abs(gradient) > 0)


# The ways to run it.


def loss_and_gradients(model, scan, remat):
    graph, params = nnx.split(model)
    config = dataclasses.replace(model.config, scan_layers=scan, remat=remat)

    def loss(params):
        model = nnx.merge(graph, params)
        model.config = config
        logits = jax.nn.log_softmax(model(TOKENS[:, :-1], attention_fn(2.0)))
        return -jnp.mean(jnp.take_along_axis(logits, TOKENS[:, 1:, None], axis=-1))

    return loss, params


@pytest.mark.parametrize("scan, remat", [(True, "none"), (True, "dots"), (False, "full")])
def test_scan_and_remat_change_no_number(scan, remat, plain_loop):
    model, expected = plain_loop
    loss, params = loss_and_gradients(model, scan, remat)
    value, gradients = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, expected[0], rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-4), gradients, expected[1])


@pytest.fixture(scope="module")
def plain_loop():
    model = make(position="rope", qk_norm=True)
    loss, params = loss_and_gradients(model, scan=False, remat="none")
    return model, jax.jit(jax.value_and_grad(loss))(params)


def test_remat_keeps_less(plain_loop):
    def kept(remat):
        loss, params = loss_and_gradients(plain_loop[0], scan=True, remat=remat)
        residuals = jax.eval_shape(lambda params: jax.vjp(loss, params)[1], params)
        return sum(x.size for x in jax.tree.leaves(residuals))

    assert kept("full") < kept("dots") < kept("none")


def test_documents_that_share_a_row_are_as_if_alone():
    model = make(position="rope")
    segments = jnp.array([[1] * 4 + [2] * 5] * 2)
    positions = jnp.array([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    together = run(model, TOKENS, attention_fn(2.0, query_segment_ids=segments), positions)
    for part in (slice(4), slice(4, None)):
        alone = run(model, TOKENS[:, part], attention_fn(2.0))
        np.testing.assert_allclose(together[:, part], alone, atol=2e-5)


def test_bfloat16_activations():
    wide = make(position="alibi", qk_norm=True)
    narrow = make(position="alibi", qk_norm=True, dtype="bfloat16")
    assert jax.eval_shape(lambda: narrow.hidden(TOKENS, attention_fn(2.0))).dtype == jnp.bfloat16
    logits, expected = (np.asarray(run(model, TOKENS, attention_fn(2.0))) for model in (narrow, wide))
    assert logits.dtype == jnp.float32
    assert np.sqrt(np.mean((logits - expected) ** 2)) < 0.03 * expected.std()
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(nnx.state(narrow)))


def test_published_sizes():
    """The parameters of GPT-2 small and of the largest, as published: 124M and 1.5B."""
    for num_layers, num_heads, features, millions in [(12, 12, 768, 124.44), (48, 25, 1600, 1557.61)]:
        config = GPTConfig(
            vocab_size=50257, max_length=1024, num_layers=num_layers, num_heads=num_heads, features=features
        )
        model = nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0)))  # noqa: B023
        num_params = sum(x.size for x in jax.tree.leaves(nnx.state(model)))
        assert round(num_params / 1e6, 2) == millions


# Bad input.


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("num_layers", 0, "num_layers must be a whole number > 0, got 0"),
        ("features", 25, "features must be a multiple of num_heads = 4 where head_dim is 0, got 25"),
        ("num_key_value_heads", 3, "num_key_value_heads must be a divisor of num_heads = 4, got 3"),
        ("mlp", "relu", "mlp must be one of gelu, relu2, swiglu, got 'relu'"),
        ("position", "rotary", "position must be one of learned, rope, alibi, none, got 'rotary'"),
        ("output_norm", "layer", "output_norm must be one of"),
        ("norm", "batch", "norm must be one of layer, rms"),
        ("remat", "some", "remat must be one of none, dots, full"),
        ("dtype", "float16", "dtype must be one of float32, bfloat16"),
        ("rope_fraction", 0.5, r"rope_fraction must be in \(0, 1\], and 6 features times it an even"),
        ("rope_scaling", "ntk", "rope_scaling must be one of none, linear, yarn"),
        ("rope_factor", 0.5, "rope_factor must be a finite number >= 1"),
        ("rope_factor", 2.0, "rope_factor must be 1 where rope_scaling is none, got 2.0"),
        ("rope_fraction", 0.01, "rope_fraction must be in"),
        ("rope_fraction", 4 / 3, "rope_fraction must be in"),
        ("norm_eps", 0.0, "norm_eps must be a number in"),
        ("logits_soft_cap", -1.0, "logits_soft_cap must be a finite number >= 0"),
        ("attention_scale", math.nan, "attention_scale must be a finite number >= 0, got nan"),
    ],
)
def test_config_that_cannot_be(field, value, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**SIZES | {"position": "rope"} | {field: value})


@pytest.mark.parametrize(
    "field, value, message",
    [
        ("max_length", 16.5, "max_length must be a whole number, got 16.5"),
        ("num_layers", True, "num_layers must be a whole number, got True"),
        ("features", "24", "features must be a whole number, got '24'"),
        ("norm_eps", None, "norm_eps must be a number, got None"),
        ("qk_norm", 1, "qk_norm must be True or False, got 1"),
        ("mlp", ["gelu"], "mlp must be a word"),
    ],
)
def test_config_of_another_type(field, value, message):
    with pytest.raises(TypeError, match=message):
        GPTConfig(**SIZES | {field: value})


def test_scaling_of_rotations_that_there_are_not():
    with pytest.raises(ValueError, match="rope_scaling must be none with position = alibi, got 'yarn'"):
        GPTConfig(**SIZES, position="alibi", rope_scaling="yarn")
    assert GPTConfig(**SIZES | {"head_dim": 100}, position="rope", rope_fraction=0.58).rotated_features == 58


def test_more_tokens_than_learned_positions():
    with pytest.raises(ValueError, match="at most max_length = 16 positions, got 17"):
        make()(jnp.zeros((1, 17), int), attention_fn(1.0))
