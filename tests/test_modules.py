"""Attention modules that learn their normaliser's parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import attnorm
from attnorm.modules import LinenNormalizedAttention, NormalizedAttention
from attnorm.normalizers.learned import Learned
from attnorm.normalizers.registry import learned_parameters

LEARNED = {name: learned_parameters(name) for name in attnorm.normalizer_names()}
X = np.random.default_rng(0).normal(size=(2, 12, 16)).astype(np.float32)


def test_the_published_parameters_can_be_learned():
    found = {(name, parameter) for name, learned in LEARNED.items() for parameter in learned}
    assert {("lp", "p"), ("sink", "b"), ("ssmax", "h"), ("entmax", "alpha"), ("elastic", "tau")} <= found
    assert LEARNED["ssmax"]["h"].init == 0.168 and LEARNED["sink"]["b"].init == 0.0


@pytest.mark.parametrize("name, parameter", [(n, p) for n, learned in LEARNED.items() for p in learned])
def test_a_learned_parameter_starts_where_it_says_and_stays_in_its_range(name, parameter):
    learned = LEARNED[name][parameter]
    np.testing.assert_allclose(
        learned.value(jnp.float32(learned.start())), learned.init, rtol=1e-6, atol=1e-7
    )
    values = learned.value(jnp.array([-15.0, -0.1, 2.0, 1e4], jnp.float32))
    attnorm.get_normalizer(name, **{parameter: values})  # which refuses what it cannot take
    assert jax.grad(learned.value)(0.3) > 0


def test_bounds_of_every_kind():
    for learned in (Learned(0.5), Learned(0.5, low=0.2), Learned(0.5, high=0.9), Learned(0.5, 0.2, 0.9)):
        np.testing.assert_allclose(learned.value(learned.start()), 0.5, rtol=1e-6)
        low, high = (learned.value(jnp.float32(x)) for x in (-90, 90))
        np.testing.assert_allclose(low, learned.low if learned.low > -np.inf else -90, atol=1)
        np.testing.assert_allclose(high, learned.high if learned.high < np.inf else 90, atol=1)
        assert learned.low <= low < high <= learned.high
    with pytest.raises(ValueError, match="between 1 and 2, got 2"):
        Learned(2.0, 1.0, 2.0)


def attention_by_hand(params, rule, **options):
    """The same attention from its parameters as nested dictionaries."""

    def project(name):
        return jnp.einsum("btd,dnh->btnh", X, params[name]["kernel"]) + params[name]["bias"]

    attended = attnorm.dot_product_attention(
        *(project(name) for name in ("query", "key", "value")), normalizer=rule, **options
    )
    return jnp.einsum("btnh,nhd->btd", attended, params["out"]["kernel"]) + params["out"]["bias"]


def test_both_modules_are_attention_with_their_normaliser():
    layer = NormalizedAttention(4, 16, normalizer="ssmax", num_key_value_heads=2, rngs=nnx.Rngs(0))
    linen_layer = LinenNormalizedAttention(num_heads=4, normalizer="ssmax", num_key_value_heads=2)
    params = linen_layer.init(jax.random.key(0), X)["params"]
    rule = attnorm.get_normalizer("ssmax", h=jnp.full(4, 0.168), c=jnp.zeros(4))
    expected = jax.jit(lambda params: attention_by_hand(params, rule, is_causal=True))(params)
    got = jax.jit(lambda params: linen_layer.apply({"params": params}, X, is_causal=True))(params)
    np.testing.assert_allclose(got, expected, atol=2e-6)

    for name in ("query", "key", "value", "out"):
        for leaf in ("kernel", "bias"):
            getattr(getattr(layer, name), leaf)[...] = params[name][leaf]
    got = nnx.jit(lambda layer: layer(X, is_causal=True))(layer)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    assert layer.key.kernel.shape == (16, 2, 4) and params["normalizer_h"].shape == (4,)


@pytest.mark.parametrize("name", ["lp", "entmax"])
def test_every_head_learns_its_own_parameter(name):
    """Gradients reach them, and a step against the gradient lowers the loss."""
    layer = NormalizedAttention(2, 16, normalizer=name, rngs=nnx.Rngs(1))
    target = np.random.default_rng(1).normal(size=X.shape).astype(np.float32)

    @nnx.jit
    def value_and_grad(layer):
        return nnx.value_and_grad(lambda layer: jnp.mean((layer(3 * X, is_causal=True) - target) ** 2))(layer)

    before, gradients = value_and_grad(layer)
    ((parameter, gradient),) = gradients["of_normalizer"].items()
    slopes = np.asarray(gradient[...])
    assert slopes.shape == (2,) and np.abs(slopes).min() > 0 and slopes[0] != slopes[1]
    layer.of_normalizer[parameter][...] -= 0.05 * slopes / np.abs(slopes).max()
    after, _ = value_and_grad(layer)
    assert after < before


def test_what_is_learned_can_be_chosen():
    layer = NormalizedAttention(
        4,
        16,
        normalizer="asentmax",
        learned=("beta",),
        parameters={"beta": 0.3, "gamma": 2.0},
        rngs=nnx.Rngs(0),
    )
    rule = layer.normalizer()
    np.testing.assert_allclose(rule.beta, np.full(4, 0.3), rtol=1e-6)
    assert (rule.gamma, rule.delta) == (2.0, 1.0) and list(layer.of_normalizer) == ["beta"]
    fixed = NormalizedAttention(4, 16, normalizer="lp", learned=(), parameters={"p": 3}, rngs=nnx.Rngs(0))
    assert fixed.normalizer() == attnorm.get_normalizer("lp", p=3) and not fixed.of_normalizer
    assert not NormalizedAttention(4, 16, normalizer="sparsemax", learned=(), rngs=nnx.Rngs(0)).of_normalizer


def test_dropout_only_with_a_key():
    layer = NormalizedAttention(2, 16, normalizer="lp", dropout_rate=0.5, rngs=nnx.Rngs(0))
    call = nnx.jit(lambda layer, key: layer(X, dropout_rng=key))
    plain, dropped = call(layer, None), call(layer, jax.random.key(0))
    assert np.abs(plain - dropped).max() > 1e-3
    np.testing.assert_array_equal(dropped, call(layer, jax.random.key(0)))


@pytest.mark.parametrize(
    "x, x_kv, error, words",
    [
        (np.zeros((2, 5, 17)), None, ValueError, r"^x must .* \(B, T, 16\) or \(T, 16\), got \(2, 5, 17\)"),
        (np.zeros(16), None, ValueError, r"^x must have shape \(B, T, .*\), got \(16,\)"),
        (np.zeros((1, 2, 5, 16)), None, ValueError, r"^x must have shape .*, got \(1, 2, 5, 16\)"),
        (X, np.zeros((2, 7, 17)), ValueError, r"^x_kv must have shape \(2, S, 16\), got \(2, 7, 17\)"),
        (X, np.zeros((3, 7, 16)), ValueError, r"^x_kv must have shape \(2, S, 16\), got \(3, 7, 16\)"),
        (X, np.zeros((7, 16)), ValueError, r"^x_kv must have shape \(2, S, 16\), got \(7, 16\)"),
        ([1.0], None, TypeError, "^x must be an array, got list"),
        (X, "x", TypeError, "^x_kv must be an array, got str"),
    ],
)
def test_bad_inputs(x, x_kv, error, words):
    with pytest.raises(error, match=words):
        NormalizedAttention(4, 16, rngs=nnx.Rngs(0))(x, x_kv)
    layer = LinenNormalizedAttention(num_heads=4)
    kernels = {name: {"kernel": np.zeros((16, 4, 4))} for name in ("query", "key")}
    with pytest.raises(error, match=words):
        layer.apply({"params": kernels}, x, x_kv)


def test_parameters_of_linen_may_carry_the_names_of_their_axes():
    x = jax.random.normal(jax.random.key(0), (2, 5, 8))
    layer = LinenNormalizedAttention(num_heads=2, normalizer="l2")
    variables = layer.init(jax.random.key(1), x)
    boxed = jax.tree.map(lambda leaf: linen.Partitioned(leaf, names=(None,) * leaf.ndim), variables)
    np.testing.assert_array_equal(layer.apply(boxed, x), layer.apply(variables, x))
    with pytest.raises(ValueError, match=r"^x must have shape \(B, T, 8\)"):
        layer.apply(boxed, x[..., :7])


def test_inputs_of_linen_may_have_other_features_where_keys_come_from():
    layer, x_kv = LinenNormalizedAttention(num_heads=4), jnp.ones((2, 3, 10))
    params = jax.eval_shape(layer.init, jax.random.key(0), X, x_kv)
    assert params["params"]["value"]["kernel"].shape == (10, 4, 4)
    with pytest.raises(ValueError, match=r"^x_kv must have shape \(2, S, 10\), got \(2, 12, 16\)"):
        jax.eval_shape(layer.apply, params, X)


@pytest.mark.parametrize(
    "rngs, got", [(0, "0"), (None, "None"), (nnx.Rngs(dropout=0), r"\['dropout'\]")], ids=str
)
def test_bad_rngs(rngs, got):
    with pytest.raises(TypeError, match=f'rngs must be an nnx.Rngs with a "params" .*, got {got}'):
        NormalizedAttention(4, 16, rngs=rngs)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"normalizer": "l2", "learned": ("p",)}, ValueError, r"learned .* got 'p'"),
        ({"normalizer": "entmax", "parameters": {"alpha": 2.0}}, ValueError, "between 1 and 2, got 2.0"),
        ({"normalizer": "entmax", "parameters": {"alpha": 3.0}}, ValueError, "alpha must be from 0.1 to 2"),
        ({"normalizer": "sink", "parameters": {"a": 1.0}}, TypeError, "has parameters .*b.* got 'a'"),
        ({"normalizer": "sink", "parameters": {"b": np.zeros(4)}}, TypeError, "parameters must be numbers"),
        ({"parameters": "p"}, TypeError, "parameters must be a mapping from names to values, got 'p'"),
        ({"parameters": {"p": 0.0}}, ValueError, "p must be"),
        (
            {"normalizer": "softmax_plus_n", "parameters": {"n": 0}},
            ValueError,
            "parameters: n: .* between 0 and inf, got 0; without 'n' in learned it stays there",
        ),
        ({"learned": "p"}, TypeError, "learned must be a sequence of names, got 'p'"),
        ({"normalizer": "lpp"}, ValueError, "did you mean 'lp'"),
        ({"normalizer": "lp(p=3)"}, ValueError, r"by keyword: get_normalizer\('lp', ...\)"),
        ({"normalizer": attnorm.get_normalizer("lp")}, TypeError, "normalizer must be a name, got Lp"),
        ({"head_dim": 0}, ValueError, "head_dim must be at least 1, got 0"),
        ({"out_features": 0}, ValueError, "out_features must be at least 1, got 0"),
        ({"num_key_value_heads": 2.0}, TypeError, "num_key_value_heads must be a whole number, got 2.0"),
        ({"dropout_rate": 1.0}, ValueError, r"dropout_rate must be in \[0, 1\), got 1.0"),
        ({"num_key_value_heads": 3}, ValueError, "multiple of num_key_value_heads, got 4 and 3"),
    ],
)
def test_bad_arguments(options, error, words):
    with pytest.raises(error, match=words):
        NormalizedAttention(4, 16, **options, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=words):
        LinenNormalizedAttention(num_heads=4, **options).init(jax.random.key(0), X)
