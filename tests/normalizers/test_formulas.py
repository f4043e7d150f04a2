"""Every normaliser with a published formula as a function of logits: values, gradients, edges and limits."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm.normalizers.general import FUNCTIONS
from tests import oracles
from tests.checks import double_precision
from tests.oracles import FORMULAS, Row

CHOICES = [choice for name in FORMULAS for choice in oracles.choices(name)]
KEYS = 11


def numbers(params):
    """Per-head pairs become one value for each of three rows."""
    return {k: np.linspace(*x, 3)[:, None] if isinstance(x, tuple) else x for k, x in params.items()}


@pytest.mark.parametrize("name, params", CHOICES)
def test_weights_and_gradients(name, params):
    """In float64, with hidden keys, hidden NaNs and an empty row."""
    rng = np.random.default_rng(0)
    logits, d_weights = 2 * rng.normal(size=(2, 3, KEYS))
    where = rng.random((3, KEYS)) < 0.6
    where[1] = False
    logits[2, 4], where[2, 4] = np.nan, False
    params = numbers(params)
    leaves = {k: x for k, x in params.items() if isinstance(x, np.ndarray)}

    def weights(logits, leaves):
        return getattr(attnorm, name)(logits, where=where, **params | leaves)

    with double_precision():
        got, pull = jax.vjp(weights, jnp.asarray(logits), jax.tree.map(jnp.asarray, leaves))
        d_logits, d_leaves = jax.device_get(pull(jnp.asarray(d_weights)))
    assert got.dtype == np.float64
    expected, expected_logits = np.zeros((2, 3, KEYS))
    expected_leaves = {k: np.zeros(3) for k in leaves}
    for r in (0, 2):
        seen = np.flatnonzero(where[r])
        row = Row.of(seen, KEYS - 1)
        of_row = {k: float(np.broadcast_to(x, (3, 1))[r, 0]) for k, x in leaves.items()}
        of_row = params | of_row
        expected[r, seen] = FORMULAS[name].weights(logits[r, seen], row, **of_row)[0]
        back = FORMULAS[name].backward(logits[r, seen], row, d_weights[r, seen], 0.0, **of_row)
        expected_logits[r, seen] = back.logits
        for k in leaves:
            expected_leaves[k][r] = back.params[k]
    np.testing.assert_allclose(got, expected, rtol=1e-11, atol=1e-14)
    np.testing.assert_allclose(d_logits, expected_logits, rtol=1e-10, atol=1e-13)
    for k, x in leaves.items():
        summed = expected_leaves[k][:, None] if x.ndim else expected_leaves[k].sum()
        np.testing.assert_allclose(d_leaves[k], summed, rtol=1e-10, atol=1e-13, err_msg=k)


@pytest.mark.parametrize("name", FORMULAS)
def test_numbers_of_any_size_give_finite_weights_and_slopes(name):
    """Logits to 1e4 in float32 and bfloat16, equal ones, and a key of logit -inf, which is as if removed."""
    rng = np.random.default_rng(1)
    rows = [1e4 * rng.normal(size=7).clip(-1, 1), np.full(7, 1e4), np.full(7, -1e4), np.zeros(7)]
    with_hole = rng.normal(size=7)
    with_hole[2] = -np.inf
    function = getattr(attnorm, name)
    for dtype in (jnp.float32, jnp.bfloat16):
        logits = jnp.asarray([*rows, with_hole], dtype)
        weights, pull = jax.vjp(function, logits)
        assert weights.dtype == dtype
        (slopes,) = pull(jnp.asarray(rng.normal(size=weights.shape), dtype))
        assert np.isfinite(np.asarray(weights, np.float32)).all()
        assert np.isfinite(np.asarray(slopes, np.float32)).all()
        assert weights[4, 2] == 0 and slopes[4, 2] == 0
        hidden = function(logits, where=np.arange(7) != 2)[4]
        np.testing.assert_allclose(
            *(np.asarray(x, np.float32) for x in (weights[4], hidden)), rtol=4 * float(jnp.finfo(dtype).eps)
        )
        wide = function(logits.astype(jnp.float32))
        np.testing.assert_array_equal(weights, wide.astype(dtype))
    if "distance" not in attnorm.get_normalizer(name).needs:  # else the others would stand elsewhere
        logits = jnp.asarray([*rows, with_hole], jnp.float32)
        kept, removed = np.delete(function(logits)[4], 2), function(np.delete(logits, 2, axis=1))[4]
        np.testing.assert_allclose(kept, removed, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("F", FUNCTIONS)
def test_general_is_finite_at_large_logits_up_to_the_documented_norm(F):
    logits = jnp.linspace(-1e4, 1e4, 9)
    for p in (1.0, 2.0, 4.0):
        weights, slopes = attnorm.general(logits, F=F, p=p), jax.jacobian(attnorm.general)(logits, F=F, p=p)
        assert np.isfinite(weights).all() and np.isfinite(slopes).all()
        np.testing.assert_allclose(np.sum(np.abs(weights) ** p), 1, rtol=1e-5)


def test_every_power_is_finite_at_large_logits():
    for k in range(1, 9):
        weights, pull = jax.vjp(lambda s, k=k: attnorm.polynomial(s, k=k), jnp.array([-1e4, 0.0, 1e4]))
        assert np.isfinite(weights).all() and np.isfinite(pull(jnp.ones(3))[0]).all()


def test_general_beyond_float32_is_not_finite_as_documented():
    """At p = 5 the sum of |1e8|^p leaves float32, and the weights of its inverse root are 0."""
    assert not attnorm.general(jnp.array([1e4, 1e4]), F="one_plus_square", p=5.0).any()


@pytest.mark.parametrize("name", ["ssmax", "scale_invariant", "softpick", "relu", "nap"])
def test_axes_and_where(name):
    rng = np.random.default_rng(2)
    logits, function = rng.normal(size=(3, 4)).astype(np.float32), getattr(attnorm, name)
    np.testing.assert_allclose(function(logits.T, axis=0), function(logits).T, rtol=1e-6)
    where = np.array([True, True, False, True])
    got = function(logits, where=where)
    np.testing.assert_array_equal(got, function(logits, where=np.tile(where, (3, 1))))
    assert not got[:, 2].any()
    assert function(np.zeros((3, 0), np.float32)).shape == (3, 0)


def test_positions_are_those_of_the_queries():
    logits = jnp.zeros((3, 5))
    position = jnp.array([0, 2, 4])[:, None]
    got = attnorm.alibi(logits, slope=math.log(2), position=position)
    expected = 0.5 ** np.abs(np.arange(5) - np.asarray(position))
    np.testing.assert_allclose(got, expected / expected.sum(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(attnorm.alibi(logits[0], slope=math.log(2)), got[2], rtol=1e-6)


def test_published_limits():
    logits = np.random.default_rng(3).normal(size=(4, 9)).astype(np.float32)
    softmax = np.asarray(attnorm.softmax(logits))

    def is_softmax(weights, rtol=2e-6):
        np.testing.assert_allclose(weights, softmax, rtol=rtol)

    is_softmax(attnorm.ssmax(logits, h=1 / math.log(9)))
    is_softmax(attnorm.ssmax(logits, h=0.0, c=1.0))
    is_softmax(attnorm.log_n(logits, n_train=9))
    is_softmax(attnorm.log_n(logits, n_train=100, floor=1.0))
    is_softmax(attnorm.critical(logits, gamma=1 / math.log(9)))
    is_softmax(attnorm.sqrt_log_n(logits / math.sqrt(2 * math.log(9))))
    is_softmax(attnorm.yarn(logits, r=1))
    is_softmax(attnorm.llama4(logits))
    is_softmax(attnorm.scale_invariant(logits, tau=1e9))
    is_softmax(attnorm.alibi(logits, slope=0))
    is_softmax(attnorm.affine(logits))
    is_softmax(attnorm.general(logits, F="exp"))
    np.testing.assert_allclose(
        attnorm.general(logits, F="exp", p=2, T=0.5), attnorm.l2(2 * logits), rtol=2e-6
    )
    is_softmax(
        attnorm.sigmoid(logits - 20, b=0.0) / attnorm.sigmoid(logits - 20, b=0.0).sum(-1)[:, None], 1e-5
    )
    is_softmax(attnorm.softpick(logits + 15, eps=0), 1e-5)
    one = attnorm.general(np.tanh(logits), F="one_plus_square", p=40)
    np.testing.assert_allclose(one.max(-1), 1, rtol=0.06)  # p -> inf: the largest weight is 1
    np.testing.assert_allclose(attnorm.affine(logits, alpha=3.0, alpha_ma=0.7).sum(-1), 0.7, rtol=1e-5)
    assert not attnorm.threshold_rectified(np.tanh(logits), beta=1.0, d=1.0).any()


@pytest.mark.parametrize(
    "name, params, fragments",
    [
        ("general", {"F": "tanh"}, ["F ", "softplus", "'tanh'"]),
        ("general", {"F": ["relu"]}, ["F ", "softplus", "['relu']"]),
        ("general", {"T": 0.0}, ["T ", "positive", "0.0"]),
        ("general", {"F": "exp", "T": math.inf}, ["T ", "to 1e+20", "inf"]),
        ("general", {"F": "exp", "p": -1.0}, ["p ", "positive", "-1"]),
        ("ssmax", {"h": math.inf}, ["h ", "finite", "inf"]),
        ("log_n", {"n_train": 1.5}, ["n_train ", "at least 2", "1.5"]),
        ("log_n", {"floor": -1.0}, ["floor ", "-1"]),
        ("yarn", {"r": 0.5}, ["r ", "at least 1", "0.5"]),
        ("llama4", {"floor_scale": 0.0}, ["floor_scale ", "at least 1"]),
        ("scale_invariant", {"tau": -1.0}, ["tau ", "positive"]),
        ("alibi", {"slope": math.nan}, ["slope ", "finite", "nan"]),
        ("critical", {"gamma": math.inf}, ["gamma ", "finite"]),
        ("sigmoid", {"b": -math.inf}, ["b ", "finite"]),
        ("relu", {"alpha": math.nan}, ["alpha ", "finite"]),
        ("reluformer", {"gamma": 0.0}, ["gamma ", "positive"]),
        ("softpick", {"eps": -1e-3}, ["eps ", "zero or positive"]),
        ("nap", {"eps": 0.0}, ["eps ", "positive"]),
        ("nap", {"gain": math.inf}, ["gain ", "finite"]),
        ("affine", {"alpha": math.nan}, ["alpha ", "finite"]),
        ("threshold_rectified", {"d": 0.0}, ["d ", "positive"]),
        ("polynomial", {"k": 2.5}, ["k ", "whole number", "2.5"]),
        ("polynomial", {"k": True}, ["k ", "whole number", "True"]),
        ("polynomial", {"k": 9}, ["k ", "from 1 to 8", "9"]),
        ("polynomial", {"k": np.array(2.0)}, ["k ", "whole number"]),
        ("alibi", {"position": np.zeros(5)}, ["position ", "(5,)", "size 1"]),
    ],
)
def test_bad_parameters(name, params, fragments):
    with pytest.raises(ValueError) as caught:
        getattr(attnorm, name)(jnp.zeros((2, 5)), **params)
    assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)


def test_names_of_functions_are_static():
    rules = [attnorm.get_normalizer("general", F=F, p=jnp.array(2.0)) for F in ("relu", "gelu")]
    assert [len(jax.tree.leaves(rule)) for rule in rules] == [1, 1]
    assert jax.tree.structure(rules[0]) != jax.tree.structure(rules[1])
    assert jax.tree.map(lambda x: 2 * x, rules[0]).F == "relu"
    assert attnorm.get_normalizer("polynomial", k=2) != attnorm.get_normalizer("polynomial", k=3)
