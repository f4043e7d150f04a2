"""The oracles against finite differences, and the check helper against wrong results."""

import ast
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from tests import oracles, oracles_solver
from tests.checks import assert_close, plain_attention
from tests.oracles import FORMULAS, ORACLES, attention, visible_keys

ROWS = [(name, params) for name in ORACLES for name, params in oracles.choices(name)]
SHAPE = (2, 4, 3, 5)  # B, N, T, S; two key heads


def numbers(params, heads=1):
    """The parameters of one choice as float64 arrays."""
    return {k: np.linspace(*x, heads) if isinstance(x, tuple) else np.asarray(x) for k, x in params.items()}


def difference(f, x, direction, step=1e-6):
    return (f(x + step * direction) - f(x - step * direction)) / (2 * step)


@pytest.mark.parametrize("name, params", ROWS)
def test_backward_of_a_row_is_the_finite_difference(name, params):
    rng = np.random.default_rng(0)
    logits, direction, d_weights = rng.normal(size=(3, 7))
    params = {k: float(x.mean()) for k, x in numbers(params, 3).items()}
    row = ORACLES[name].backward(logits, d_weights, 0.7, **params)

    def loss(logits, params):
        weights, log_norm = ORACLES[name].weights(np, logits, **params)
        return weights @ d_weights + 0.7 * log_norm

    slope = difference(lambda s: loss(s, params), logits, direction)
    np.testing.assert_allclose(row.logits @ direction, slope, rtol=1e-7, atol=1e-8)
    for key, got in row.params.items():
        slope = difference(lambda x, key=key: loss(logits, params | {key: x}), params[key], 1.0)
        np.testing.assert_allclose(got, slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name, params", [choice for name in FORMULAS for choice in oracles.choices(name)])
def test_gradients_of_a_formula_are_the_finite_differences(name, params):
    rng = np.random.default_rng(0)
    logits, direction, d_weights = rng.normal(size=(3, 7))
    fixed = {k: x for k, x in params.items() if isinstance(x, str | int)}
    moved = {k: float(np.mean(x)) for k, x in params.items() if k not in fixed}
    row = oracles.Row.of([0, 1, 3, 4, 7, 8, 9], 9)

    def loss(logits, moved):
        weights, log_norm = FORMULAS[name].weights(logits, row, **fixed, **moved)
        return weights @ d_weights + 0.7 * log_norm

    got = FORMULAS[name].backward(logits, row, d_weights, 0.7, **fixed, **moved)
    slope = difference(lambda s: loss(s, moved), logits, direction)
    np.testing.assert_allclose(got.logits @ direction, slope, rtol=1e-7, atol=1e-8)
    assert set(got.params) == set(moved)
    for key in moved:
        slope = difference(lambda x, key=key: loss(logits, moved | {key: x}), moved[key], 1.0)
        np.testing.assert_allclose(got.params[key], slope, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("name, params", ROWS)
def test_weights_are_the_formula_written_out(name, params):
    logits = np.array([0.3, -1.2, 2.0, 0.0])
    params = {k: float(x.mean()) for k, x in numbers(params, 3).items()}
    e = np.exp(logits)
    p = {"softmax": 1.0, "l2": 2.0, "linf": np.inf}.get(name, params.get("p"))
    norm = {
        "softmax_plus_n": lambda: params["n"] + e.sum(),
        "sink": lambda: np.exp(params["b"]) + e.sum(),
    }.get(name, lambda: np.linalg.norm(e, p) if p >= 1 else (e**p).sum() ** (1 / p))()
    weights, log_norm = ORACLES[name].weights(np, logits, **params)
    np.testing.assert_allclose(weights, e / norm, rtol=1e-14)
    np.testing.assert_allclose(log_norm, np.log(norm), rtol=1e-14)


OPTIONS = {
    "bias": {},
    "soft cap": {"logits_soft_cap": 1.5, "scale": 0.9},
    "everything": {
        "logits_soft_cap": 2.0,
        "is_causal": True,
        "query_offset": np.array([2, 0]),
        "local_window_size": (3, None),
        "query_seq_lengths": np.array([3, 2]),
        "key_value_seq_lengths": np.array([5, 4]),
        "query_segment_ids": np.array([[0, 0, 1], [0, 1, 2]]),
        "key_value_segment_ids": np.array([[0, 0, 1, 1, 1], [0, 0, 1, 1, 1]]),
    },
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(
    "name, params", [("softmax", {}), ("lp", {"p": (0.75, 6.0)}), ("sink", {"b": np.array(0.5)})]
)
def test_attention_gradients_are_finite_differences(name, params, options):
    B, N, T, S = SHAPE
    rng = np.random.default_rng(1)
    options = dict(OPTIONS[options])
    kept = {k: options.pop(k) for k in ("logits_soft_cap", "scale") if k in options}
    visible = visible_keys(SHAPE, **options)
    arrays = {
        "query": rng.normal(size=(B, T, N, 6)),
        "key": rng.normal(size=(B, S, 2, 6)),
        "value": rng.normal(size=(B, S, 2, 7)),
        "bias": rng.normal(size=(1, N, 1, S)),
        **numbers(params, N),
    }
    d_output, d_log_norm = rng.normal(size=(B, T, N, 7)), rng.normal(size=(B, T, N))

    def run(arrays):
        inputs = dict(arrays)
        heads = {k: inputs.pop(k) for k in params}
        return attention(
            **inputs,
            normalizer=name,
            params=heads,
            visible=visible,
            **kept,
            d_output=d_output,
            d_log_norm=d_log_norm,
        )

    def loss(arrays):
        result = run(arrays)
        log_norm = np.where(np.isfinite(result.log_norm), result.log_norm, 0)
        return (result.output * d_output).sum() + (log_norm * d_log_norm).sum()

    gradients = run(arrays).gradients
    for key, x in arrays.items():
        direction = rng.normal(size=x.shape)
        slope = difference(lambda y, key=key: loss(arrays | {key: y}), x, direction)
        np.testing.assert_allclose(
            (gradients[key] * direction).sum(), slope, rtol=1e-6, atol=1e-7, err_msg=key
        )


def test_attention_is_the_einsum_of_its_weights():
    rng = np.random.default_rng(2)
    query, key, value = (
        rng.normal(size=(1, 3, 4, 8)),
        rng.normal(size=(1, 5, 2, 8)),
        rng.normal(size=(1, 5, 2, 6)),
    )
    logits = np.einsum("btnh,bsnh->bnts", query, np.repeat(key, 2, 2)) / np.sqrt(8)
    weights = np.exp(logits) / np.sqrt((np.exp(logits) ** 2).sum(-1, keepdims=True))
    expected = np.einsum("bnts,bsnh->btnh", weights, np.repeat(value, 2, 2))
    got = attention(query, key, value, normalizer="l2", params={}, visible=np.ones((1, 4, 3, 5), bool))
    np.testing.assert_allclose(got.output, expected, rtol=1e-13, atol=1e-13)


def test_a_hidden_key_is_the_same_as_a_removed_one():
    rng = np.random.default_rng(3)
    query, key, value = (
        rng.normal(size=(1, 4, 2, 8)),
        rng.normal(size=(1, 6, 2, 8)),
        rng.normal(size=(1, 6, 2, 8)),
    )
    d_output, kept = rng.normal(size=(1, 4, 2, 8)), np.array([0, 2, 5])
    hidden = [1, 3, 4]
    visible = np.zeros((1, 2, 4, 6), bool)
    visible[..., kept] = True
    key[:, hidden], value[:, hidden] = np.nan, np.inf
    whole = attention(query, key, value, normalizer="l2", params={}, visible=visible, d_output=d_output)
    small = attention(
        query,
        key[:, kept],
        value[:, kept],
        normalizer="l2",
        params={},
        visible=visible[..., kept],
        d_output=d_output,
    )
    np.testing.assert_array_equal(whole.output, small.output)
    np.testing.assert_array_equal(whole.gradients["query"], small.gradients["query"])
    for name in ("key", "value"):
        np.testing.assert_array_equal(whole.gradients[name][:, kept], small.gradients[name])
        assert not whole.gradients[name][:, hidden].any()


def test_visible_keys_by_hand():
    shape = (1, 1, 3, 4)

    def rows(**options):
        return ["".join("x" if v else "." for v in row) for row in visible_keys(shape, **options)[0, 0]]

    assert rows(is_causal=True) == ["x...", "xx..", "xxx."]
    assert rows(is_causal=True, query_offset=1) == ["xx..", "xxx.", "xxxx"]
    assert rows(local_window_size=1) == ["xx..", "xxx.", ".xxx"]
    assert rows(local_window_size=(1, 0), query_offset=np.array([1])) == ["xx..", ".xx.", "..xx"]
    assert rows(local_window_size=(None, 0)) == ["x...", "xx..", "xxx."]
    assert rows(query_seq_lengths=np.array([1])) == ["xxxx", "....", "...."]
    assert rows(key_value_seq_lengths=np.array([0])) == ["....", "....", "...."]
    assert rows(query_segment_ids=np.array([[0, 1, 7]]), key_value_segment_ids=np.array([[0, 0, 1, 1]])) == [
        "xx..",
        "..xx",
        "....",
    ]


@pytest.mark.parametrize("name, params", ROWS)
def test_plain_attention_agrees_with_the_oracle(name, params):
    B, N, T, S = SHAPE
    rng = np.random.default_rng(4)
    query, key, value = (
        rng.normal(size=(B, length, heads, 8)).astype(np.float32)
        for length, heads in ((T, N), (S, 2), (S, 2))
    )
    bias = rng.normal(size=(N, T, 1)).astype(np.float32)
    visible = rng.random(SHAPE) < 0.6
    visible[1, :, 2] = False
    params = numbers(params, N)
    oracle = attention(
        query, key, value, bias, normalizer=name, params=params, visible=visible, logits_soft_cap=3.0
    )
    fixed = {k: float(x) if x.ndim == 0 else jnp.asarray(x, jnp.float32) for k, x in params.items()}
    output, log_norm = plain_attention(
        query, key, value, bias, normalizer=name, params=fixed, visible=visible, logits_soft_cap=3.0
    )
    np.testing.assert_allclose(output, oracle.output, atol=2e-6)
    np.testing.assert_allclose(log_norm, oracle.log_norm, atol=2e-6)


def check(got, expected, plain=None, **options):
    got = np.asarray(got, np.float32)
    expected = np.asarray(expected)
    plain = np.where(np.isfinite(expected), expected, 0) if plain is None else np.asarray(plain)
    assert_close("output", got, expected, plain, **{"scale": 1.0, "largest_logit": 0.0} | options)


def test_the_check_accepts_rounding_errors():
    check([1 + 1e-7, 2.0], [1.0, 2.0])
    check([1.001, 2.0], [1.0, 2.0], plain=[1.0005, 2.0])
    check([1.001, 2.0], [1.0, 2.0], largest_logit=1e4)
    check([-np.inf, 2.0], [-np.inf, 2.0])
    check([5.0, 2.0], [np.nan, 2.0])
    check(np.zeros((0, 3)), np.zeros((0, 3)))


@pytest.mark.parametrize(
    "got, options, message",
    [
        ([np.nan, 2.0], {}, "not finite, first at \\(0,\\)"),
        ([1.0, np.inf], {}, "not finite, first at \\(1,\\)"),
        ([1.0, 2.0, 3.0], {}, "shape"),
        ([[1.0, 2.0]], {}, "shape"),
        ([1 + 1e-6, 2.0], {}, "error 9.54e-07 > 4.77e-07 at \\(0,\\)"),
        ([1.01, 2.0], {"largest_logit": 1e4}, "error"),
        ([1.001, 2.0], {"plain": [1.0001, 2.0]}, "error"),
        ([1.0, 2.0], {"plain": [np.nan, 2.0]}, "measures nothing"),
        ([1 + 1e-5, 2.0], {"largest_logit": 1e4, "strict": True}, "relative error"),
    ],
)
def test_the_check_refuses_wrong_numbers(got, options, message):
    with pytest.raises(AssertionError, match=message):
        check(got, [1.0, 2.0], **options)


@pytest.mark.parametrize("got", [[np.inf, 2.0], [np.nan, 2.0], [0.0, 2.0]])
def test_the_check_wants_the_same_infinity(got):
    with pytest.raises(AssertionError, match="where"):
        check(got, [-np.inf, 2.0])


def test_an_unknown_normaliser_is_named():
    with pytest.raises(AssertionError, match="'nobody'.*no entry in tests/oracles.py"):
        oracles.choices("nobody")


def test_a_logit_of_minus_infinity_is_a_hidden_key():
    rng = np.random.default_rng(5)
    query, key, value = rng.normal(size=(3, 1, 4, 2, 8))
    d_output, visible = rng.normal(size=(1, 4, 2, 8)), rng.random((1, 2, 4, 4)) < 0.5
    bias = np.where(visible, 0, -np.inf)
    options = {"normalizer": "l2", "params": {}, "d_output": d_output}
    hidden = attention(query, key, value, visible=visible, **options)
    weightless = attention(query, key, value, bias, visible=np.ones_like(visible), **options)
    for name, expected in hidden.gradients.items():
        np.testing.assert_allclose(weightless.gradients[name], expected, atol=1e-14)
    np.testing.assert_allclose(weightless.output, hidden.output, atol=1e-14)


def test_the_oracles_import_only_numpy():
    for module, others in ((oracles, {"tests.oracles_solver"}), (oracles_solver, set())):
        tree = ast.parse(Path(module.__file__).read_text())
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        assert imported <= {"collections.abc", "math", "typing", "numpy"} | others
