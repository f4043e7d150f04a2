"""The exponential normalisers as functions of logits, and all of them as pytrees."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm.normalizers import matrix
from tests import oracles
from tests.checks import double_precision
from tests.oracles import ORACLES

FUNCTIONS = {name: getattr(attnorm, name) for name in ORACLES}
CHOICES = [choice for name in FUNCTIONS for choice in oracles.choices(name)]


def numbers(params):
    """Per-head pairs become one value for each of three rows."""
    return {k: np.linspace(*x, 3)[:, None] if isinstance(x, tuple) else x for k, x in params.items()}


def expected_weights(name, logits, where, params):
    """The oracle on the visible logits of each row."""
    weights = np.zeros(logits.shape)
    rows = {k: np.broadcast_to(x, (len(logits), 1))[:, 0] for k, x in params.items()}
    with np.errstate(all="ignore"):
        for row in range(len(logits)):
            seen = where[row] & (logits[row] > -np.inf)
            row_params = {k: float(x[row]) for k, x in rows.items()}
            weights[row, seen] = ORACLES[name].weights(np, logits[row, seen], **row_params)[0]
    return weights


@pytest.mark.parametrize("name, params", CHOICES)
def test_weights(name, params):
    rng = np.random.default_rng(0)
    logits, where = 3 * rng.normal(size=(3, 11)), rng.random((3, 11)) < 0.6
    logits[0, 3], where[0, 3] = -np.inf, True
    where[1] = False
    logits[2, 4], where[2, 4] = np.nan, False
    params = numbers(params)
    with double_precision():
        got = FUNCTIONS[name](jnp.asarray(logits), where=where, **jax.tree.map(_as_given, params))
        assert got.dtype == np.float64
    np.testing.assert_allclose(got, expected_weights(name, logits, where, params), rtol=1e-12, atol=1e-300)


def _as_given(x):
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


@pytest.mark.parametrize("name, params", CHOICES)
def test_gradients(name, params):
    rng = np.random.default_rng(1)
    logits, d_weights = 3 * rng.normal(size=(2, 3, 11))
    where = rng.random((3, 11)) < 0.6
    where[1] = False
    logits[2, 4], where[2, 4] = np.inf, False
    params = numbers(params)
    leaves = {k: x for k, x in params.items() if isinstance(x, np.ndarray)}

    def loss(logits, leaves):
        return jnp.vdot(FUNCTIONS[name](logits, where=where, **params | leaves), d_weights)

    with double_precision():
        d_logits, d_leaves = jax.grad(loss, (0, 1))(jnp.asarray(logits), jax.tree.map(jnp.asarray, leaves))
    expected_logits, expected_params = np.zeros_like(logits), {k: np.zeros(3) for k in leaves}
    with np.errstate(all="ignore"):
        for row in range(3):
            seen = where[row]
            row_params = {k: float(np.broadcast_to(x, (3, 1))[row, 0]) for k, x in params.items()}
            backward = ORACLES[name].backward(logits[row, seen], d_weights[row, seen], 0.0, **row_params)
            expected_logits[row, seen] = backward.logits
            for k in leaves:
                expected_params[k][row] = backward.params[k]
    np.testing.assert_allclose(d_logits, expected_logits, rtol=1e-11, atol=1e-13)
    for k, x in leaves.items():
        expected = expected_params[k][:, None] if x.ndim else expected_params[k].sum()
        np.testing.assert_allclose(d_leaves[k], expected, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("value", [0.0, 1e4, -1e9, 3e38, -3e38])
def test_equal_logits_of_any_size(name, value):
    params = {"lp": {"p": 3.0}}.get(name, {})
    weights = FUNCTIONS[name](jnp.full((2, 5), value, jnp.float32), **params)
    e = np.exp(min(value, 0.0)) if name in ("sink", "softmax_plus_n") else 1.0  # against a constant of 1
    constant = np.exp(-max(value, 0.0))
    expected = {
        "softmax": 1 / 5,
        "l2": 5**-0.5,
        "lp": 5 ** (-1 / 3),
        "linf": 1.0,
        "sink": e / (constant + 5 * e),
        "softmax_plus_n": e / (constant + 5 * e),
    }[name]
    np.testing.assert_allclose(weights, np.full((2, 5), expected), rtol=3e-7)
    slope = jax.grad(lambda x: FUNCTIONS[name](x, **params)[0, 0])(jnp.full((2, 5), value, jnp.float32))
    assert np.isfinite(slope).all() and not slope[1].any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_axes(name):
    params = {"lp": {"p": 3.0}}.get(name, {})
    logits = np.random.default_rng(2).normal(size=(3, 4, 5)).astype(np.float32)
    for axis in range(-3, 3):
        got = FUNCTIONS[name](logits, axis=axis, **params)
        expected = np.moveaxis(FUNCTIONS[name](np.moveaxis(logits, axis, -1), **params), -1, axis)
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_narrow_dtypes_are_computed_in_float32(name, dtype):
    params = {"lp": {"p": 3.0}}.get(name, {})
    logits = jnp.asarray(4 * np.random.default_rng(3).normal(size=(3, 50)), dtype)
    got = FUNCTIONS[name](logits, **params)
    assert got.dtype == dtype
    expected = FUNCTIONS[name](logits.astype(jnp.float32), **params).astype(dtype)
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_where_broadcasts(name):
    params = {"lp": {"p": 3.0}}.get(name, {})
    logits = np.random.default_rng(4).normal(size=(3, 5)).astype(np.float32)
    where = np.array([True, False, True, True, False])
    got = FUNCTIONS[name](logits, where=where, **params)
    np.testing.assert_array_equal(got, FUNCTIONS[name](logits, where=np.tile(where, (3, 1)), **params))
    np.testing.assert_allclose(got[:, where], FUNCTIONS[name](logits[:, where], **params), rtol=1e-6)
    assert not got[:, ~where].any()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_empty_axes(name):
    params = {"lp": {"p": jnp.ones((3, 1))}}.get(name, {})
    assert FUNCTIONS[name](jnp.zeros((3, 0)), **params).shape == (3, 0)
    assert (
        FUNCTIONS[name](jnp.zeros((0, 3))[None, :, :, None] if params else jnp.zeros((0, 3)), **params).size
        == 0
    )
    gradient = jax.grad(lambda x: FUNCTIONS[name](x, where=jnp.zeros(5, bool), **params).sum())(
        jnp.ones((3, 5))
    )
    assert not gradient.any()


@pytest.mark.parametrize(
    "arguments, options, error, fragments",
    [
        ([np.arange(3)], {}, TypeError, ["logits", "int", "floating"]),
        ([np.zeros(3, bool)], {}, TypeError, ["logits", "bool", "floating"]),
        ([np.zeros((2, 3))], {"axis": 2}, ValueError, ["axis", "2"]),
        ([np.zeros((2, 3))], {"axis": -3}, ValueError, ["axis", "-3"]),
        ([np.zeros((2, 3))], {"where": np.ones((2, 3))}, TypeError, ["where", "float", "bool"]),
        ([np.zeros((2, 3))], {"where": np.ones((3, 2), bool)}, ValueError, ["where", "(3, 2)", "(2, 3)"]),
        (
            [np.zeros((2, 3))],
            {"where": np.ones((5, 2, 3), bool)},
            ValueError,
            ["where", "(5, 2, 3)", "(2, 3)"],
        ),
    ],
)
def test_bad_logits(arguments, options, error, fragments):
    for name, function in FUNCTIONS.items():
        with pytest.raises(error) as caught:
            function(*arguments, **options, **({"p": 3.0} if name == "lp" else {}))
        assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


@pytest.mark.parametrize(
    "name, params, fragments",
    [
        ("lp", {"p": 0.0}, ["p ", "positive", "0.0"]),
        ("lp", {"p": -2}, ["p ", "positive", "-2"]),
        ("lp", {"p": math.nan}, ["p ", "positive", "nan"]),
        ("lp", {"p": np.array(0.0)}, ["p ", "positive", "0.0"]),
        ("lp", {"p": jnp.array([2.0, math.nan])}, ["p ", "positive", "nan"]),
        ("lp", {"p": jnp.array(math.inf)}, ["p ", "finite", "inf"]),
        ("lp", {"p": jnp.ones(4)}, ["p must", "(4,)", "(2, 3)"]),
        ("sink", {"b": math.inf}, ["b ", "inf"]),
        ("sink", {"b": np.ones((2, 3, 1))}, ["b must", "(2, 3, 1)", "(2, 3)"]),
        ("softmax_plus_n", {"n": -1}, ["n ", "-1"]),
        ("softmax_plus_n", {"n": math.inf}, ["n ", "inf"]),
    ],
)
def test_bad_parameters(name, params, fragments):
    with pytest.raises(ValueError) as caught:
        FUNCTIONS[name](jnp.zeros((2, 3)), **params)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


def test_names_of_dense_functions_are_answered_with_where_they_are():
    for name in ("selective", "differential", "sinkhorn"):
        assert callable(getattr(matrix, name))
        with pytest.raises(ValueError, match=rf"got '{name}' \(.*attnorm.normalizers.matrix.{name}"):
            attnorm.get_normalizer(name)
    with pytest.raises(ValueError, match="did you mean 'sparsemax'"):
        attnorm.get_normalizer("sparse_max")


def test_positional_parameters_are_refused():
    with pytest.raises(TypeError):
        attnorm.lp(jnp.zeros(3), 2.0)


def test_limits_of_the_parameters():
    logits = np.random.default_rng(5).normal(size=(3, 7)).astype(np.float32)
    softmax = attnorm.softmax(logits)
    np.testing.assert_allclose(attnorm.softmax_plus_n(logits, n=0), softmax, rtol=1e-6)
    np.testing.assert_allclose(attnorm.sink(logits, b=-math.inf), softmax, rtol=1e-6)
    np.testing.assert_allclose(attnorm.sink(logits, b=jnp.array(-jnp.inf)), softmax, rtol=1e-6)
    np.testing.assert_array_equal(attnorm.lp(logits, p=1), softmax)
    np.testing.assert_array_equal(attnorm.lp(logits, p=2), attnorm.l2(logits))
    np.testing.assert_array_equal(attnorm.lp(logits, p=math.inf), attnorm.linf(logits))
    np.testing.assert_allclose(attnorm.lp(logits, p=1e4), attnorm.linf(logits), rtol=1e-3)
    np.testing.assert_allclose(attnorm.lp(logits, p=jnp.array(3.0)), attnorm.lp(logits, p=3), rtol=1e-6)


@pytest.mark.parametrize("name, param", [("lp", "p"), ("sink", "b"), ("softmax_plus_n", "n")])
def test_a_traced_nan_is_not_hidden(name, param):
    """It cannot be refused, so whoever learns a parameter must see it diverge."""
    weights = jax.jit(lambda x: FUNCTIONS[name](jnp.zeros(3), **{param: x}))(jnp.array(math.nan))
    assert np.isnan(weights).all()


def test_python_numbers_are_static_and_arrays_are_leaves():
    for name, params in CHOICES:
        arrays = {k: jnp.asarray(x) for k, x in numbers(params).items() if isinstance(x, np.ndarray)}
        rule = attnorm.get_normalizer(name, **numbers(params) | arrays)
        leaves, structure = jax.tree.flatten(rule)
        assert len(leaves) == len(arrays)
        again = jax.tree.unflatten(structure, leaves)
        assert type(again) is type(rule) and jax.tree.structure(again) == structure
        assert all(a is b for a, b in zip(jax.tree.leaves(again), leaves, strict=True))


def test_equality_and_hash_of_static_normalizers():
    same = attnorm.get_normalizer("lp", p=3), attnorm.get_normalizer("lp", p=3.0)
    other = attnorm.get_normalizer("lp", p=4.0)
    assert same[0] == same[1] and hash(same[0]) == hash(same[1])
    assert same[0] != other and len({*same, other}) == 2
    assert attnorm.get_normalizer("lp", p=2) == attnorm.get_normalizer("l2")
    assert attnorm.get_normalizer("lp", p=1) == attnorm.get_normalizer("softmax")
    assert attnorm.get_normalizer("lp", p=math.inf) == attnorm.get_normalizer("linf")
    assert attnorm.get_normalizer("sink", b=0) != attnorm.get_normalizer("softmax_plus_n", n=0)
    assert jax.tree.structure(same[0]) == jax.tree.structure(same[1]) != jax.tree.structure(other)


def test_normalizers_are_frozen_and_show_their_parameters():
    rule = attnorm.get_normalizer("lp", p=3)
    with pytest.raises(AttributeError):
        rule.p = 4.0
    assert "3.0" in repr(rule)


def test_no_retrace_for_equal_normalizers():
    traces = []

    @jax.jit
    def weights(rule, logits):
        traces.append(rule)
        return rule.weights(logits)

    logits = jnp.arange(3.0)
    for p in (3, 3.0, np.float32(3)):
        weights(attnorm.get_normalizer("lp", p=p), logits)
    assert len(traces) == 1
    weights(attnorm.get_normalizer("lp", p=4.0), logits)
    assert len(traces) == 2
    for p in (1.0, 2.5):
        np.testing.assert_allclose(
            weights(attnorm.get_normalizer("lp", p=jnp.array(p)), logits), attnorm.lp(logits, p=p), rtol=1e-6
        )
    assert len(traces) == 3


def test_parameters_are_mapped_and_differentiated():
    logits = np.random.default_rng(6).normal(size=7).astype(np.float32)
    powers = jnp.array([0.5, 1.0, 3.0])
    rules = jax.vmap(lambda p: attnorm.get_normalizer("lp", p=p))(powers)
    mapped = jax.vmap(lambda rule: rule.weights(logits))(rules)
    for p, row in zip(powers.tolist(), mapped, strict=True):
        np.testing.assert_allclose(row, attnorm.lp(logits, p=p), rtol=2e-6)
    gradient = jax.grad(lambda rule: rule.weights(logits)[0])(attnorm.get_normalizer("lp", p=jnp.array(3.0)))
    step = 1e-2
    slope = (attnorm.lp(logits, p=3 + step)[0] - attnorm.lp(logits, p=3 - step)[0]) / (2 * step)
    np.testing.assert_allclose(gradient.p, slope, rtol=1e-3)


def test_weights_of_a_rule_are_the_function():
    logits = np.random.default_rng(7).normal(size=(3, 5)).astype(np.float32)
    where = logits > -0.5
    for name, params in CHOICES:
        params = {k: jnp.asarray(x) if isinstance(x, np.ndarray) else x for k, x in numbers(params).items()}
        rule = attnorm.get_normalizer(name, **params)
        np.testing.assert_array_equal(
            rule.weights(logits, axis=-1, where=where),
            FUNCTIONS[name](logits, axis=-1, where=where, **params),
        )


@dataclasses.dataclass(frozen=True)
class _WithAnArray(attnorm.Normalizer):
    b: jax.Array


def test_rules_are_equal_by_value_however_they_are_decorated():
    one, same, other = (_WithAnArray(jnp.array([1.0, x])) for x in (2.0, 2.0, 3.0))
    assert one == same and one != other
    with_its_own = dataclasses.make_dataclass(
        "Rule", [], bases=(attnorm.Normalizer,), frozen=True, namespace={"__eq__": lambda self, other: True}
    )
    assert with_its_own() == 1
