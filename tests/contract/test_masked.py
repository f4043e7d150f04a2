"""Rows without visible keys, empty dimensions, and numbers under a mask that nobody may see."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from tests import oracles
from tests.contract.cases import poison
from tests.contract.helpers import (
    assert_matches_oracle,
    assert_near,
    assert_results_near,
    make_arrays,
    make_cotangents,
    make_program,
    oracle,
    run,
)

MASK = np.random.default_rng(0).random((2, 4, 50, 61)) < 0.5
MASK[:, :, 7] = False
MASK[..., 20:26] = False
SEGMENTS = {
    "query_segment_ids": np.repeat([[0, 1, 5, 2]], [20, 10, 5, 15], axis=1).repeat(2, 0).astype(np.int32),
    "key_value_segment_ids": np.repeat([[0, 1, 2, 7]], [10, 20, 20, 11], axis=1)
    .repeat(2, 0)
    .astype(np.int32),
}
HIDING = {
    "causal": {"is_causal": True, "query_offset": -3},
    "window": {"local_window_size": (4, 4), "query_offset": 30},
    "lengths": {
        "key_value_seq_lengths": np.array([30, 0], np.int32),
        "query_seq_lengths": np.array([50, 20], np.int32),
    },
    "segments": SEGMENTS,
    "mask": {"mask": MASK},
    "soft cap": {"mask": MASK, "logits_soft_cap": 3.0},
}


@pytest.mark.parametrize("hiding", HIDING)
def test_numbers_that_nobody_sees_change_nothing(attend, hiding):
    query, key, value = make_arrays()
    bias = np.random.default_rng(2).normal(size=(2, 4, 50, 61)).astype(np.float32)
    clean = {"query": query, "key": key, "value": value, "bias": bias}
    options = HIDING[hiding]
    no_cap = {k: x for k, x in options.items() if k != "logits_soft_cap"}
    visible = oracles.visible_keys((2, 4, 50, 61), **no_cap)
    params = {"p": np.array([1.0, 2.0, 3.0, 4.0], np.float32)}
    program = make_program(
        attend, normalizer="lp", params=params, cotangents=make_cotangents(query, value), **options
    )
    expected = program(clean)
    for number in (np.nan, np.inf, -np.inf):
        poisoned = poison(clean, visible, number)
        assert not np.isfinite(poisoned["key"]).all() and not np.isfinite(poisoned["bias"]).all()
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(program(poisoned)), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=f"{number} under {hiding}")


@pytest.mark.parametrize("hiding", ["causal", "window", "segments", "mask"])
def test_a_number_hidden_from_some_rows_changes_nothing_there(attend, hiding):
    """All that no row sees which sees the NaN itself must stay as it is, in the output and in every gradient."""
    query, key, value = make_arrays(B=1, T=50, S=50, N=2, K=1)
    bias = np.random.default_rng(2).normal(size=(1, 2, 50, 50)).astype(np.float32)
    ids = np.repeat([[0, 1, 2]], [15, 20, 15], axis=1).astype(np.int32)
    options = {
        "causal": {"is_causal": True},
        "window": {"local_window_size": (2, 3)},
        "segments": {"query_segment_ids": ids, "key_value_segment_ids": ids},
        "mask": {"mask": np.abs(np.subtract.outer(np.arange(50), np.arange(50))) % 7 < 3},
    }[hiding]
    options["cotangents"] = make_cotangents(query, value)
    program = make_program(attend, **options)
    wrong = []
    # Whole vectors, so that the oracle does not ask for their other features either.
    for where, index in {"query": (0, 30), "key": (0, 30), "value": (0, 30), "bias": (0, 0, 31, 30)}.items():
        arrays = {"query": query, "key": key, "value": value, "bias": bias}
        arrays[where] = arrays[where].copy()
        arrays[where][index] = np.nan
        expected = oracle(arrays, **options)
        expected.gradients[where][index] = np.nan
        try:
            assert_results_near(program(arrays), expected, 2e-6, what=f", NaN in {where}")
        except AssertionError as error:
            wrong.append(str(error))
    assert not wrong, wrong


@pytest.mark.parametrize("name", sorted(attnorm.normalizer_names()))
def test_weights_do_not_hide_a_visible_nan(name):
    logits = np.random.default_rng(0).normal(size=(2, 7)).astype(np.float32)
    logits[0, 2] = np.nan
    params = {"p": 2.0} if name == "lp" else {}
    weights = np.asarray(getattr(attnorm, name)(logits, **params))
    assert np.isnan(weights[0]).any() and np.isfinite(weights[1]).all()


@pytest.mark.parametrize("where", ["query", "key", "value", "bias"])
def test_a_visible_nan_is_not_hidden(attend, where):
    query, key, value = make_arrays(B=1, T=20, S=20, N=2, K=1)
    arrays = {"query": query, "key": key, "value": value, "bias": np.zeros((20, 20), np.float32)}
    arrays[where][{"bias": (12, 10)}.get(where, (0, 10))] = np.nan
    output = np.asarray(jax.jit(lambda arrays: attend(**arrays, is_causal=True))(arrays))
    rows = {"query": [10], "key": range(10, 20), "value": range(10, 20), "bias": [12]}[where]
    broken = np.isnan(output).all((0, 2, 3))
    assert np.flatnonzero(broken).tolist() == list(rows)
    assert np.isfinite(output[:, ~broken]).all()


def test_a_bias_of_minus_infinity_hides_no_nan_of_a_value(attend):
    """Whoever may see the key reads its value, and multiplies it by 0."""
    query, key, value = make_arrays(B=1, T=20, S=20, N=2, K=1)
    value[0, 10] = np.nan
    bias = np.zeros((20, 20), np.float32)
    bias[:, 10] = -np.inf
    for options, rows in (({"is_causal": True}, range(10, 20)), ({}, range(20))):
        output = np.asarray(jax.jit(functools.partial(attend, **options))(query, key, value, bias))
        assert np.flatnonzero(np.isnan(output).any((0, 2, 3))).tolist() == list(rows)


@pytest.mark.parametrize(
    "normalizer, params, expected",
    [
        ("softmax", {}, -np.inf),
        ("l2", {}, -np.inf),
        ("lp", {"p": np.float32(3.0) + np.zeros(4, np.float32)}, -np.inf),
        ("linf", {}, -np.inf),
        ("sink", {"b": np.array([-1.0, 0, 2, 3], np.float32)}, [-1, 0, 2, 3]),
        ("softmax_plus_n", {"n": 5.0}, np.log(5)),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_row_without_keys_is_zero_with_its_own_log_norm(attend, normalizer, params, expected):
    query, key, value = make_arrays()
    arrays = {"query": query, "key": key, "value": value, "bias": np.ones((50, 61), np.float32)}
    options = {
        "normalizer": normalizer,
        "params": params,
        "cotangents": make_cotangents(query, value),
        "mask": np.zeros((2, 4, 50, 61), bool),
    }
    output, log_norm, gradients = run(attend, arrays, **options)
    assert not output.any()
    np.testing.assert_allclose(log_norm, np.broadcast_to(expected, (2, 50, 4)), rtol=1e-6)
    for name in ("query", "key", "value", "bias"):
        assert not gradients[name].any(), name  # NaN counts as any


def test_a_logit_of_minus_infinity_is_a_hidden_key(attend):
    visible = MASK
    bias = np.where(visible, 0, -np.inf).astype(np.float32)
    for normalizer, params in (
        ("l2", {}),
        ("lp", {"p": np.array(3.0, np.float32)}),
        ("linf", {}),
        ("sink", {"b": 0.0}),
    ):
        arrays = make_arrays()
        assert_matches_oracle(attend, *arrays, bias, normalizer=normalizer, params=params, tolerance=3e-6)


@pytest.mark.parametrize("B, T, S", [(0, 5, 7), (2, 0, 7), (2, 5, 0), (2, 0, 0), (2, 1, 1)])
def test_empty_and_single_dimensions(attend, B, T, S):
    query, key, value = make_arrays(B=B, T=T, S=S)
    for params in ({"p": np.array([1.0, 2.0, 3.0, 4.0], np.float32)}, {"p": 2.0}):
        output, gradients = assert_matches_oracle(
            attend,
            query,
            key,
            value,
            np.zeros((B, 4, T, S), np.float32),
            normalizer="lp",
            params=params,
            is_causal=True,
            query_offset=10,
        )
        assert output.shape == (B, T, 4, 16)
        assert all(np.isfinite(x).all() for x in gradients.values())


def test_a_sink_without_keys_keeps_the_gradient_of_its_log_norm(attend):
    arrays = make_arrays(S=0)
    b = np.array([-1.0, 0.5, 2.0, 4.0], np.float32)
    assert_matches_oracle(attend, *arrays, normalizer="sink", params={"b": b})


def test_query_heads_share_the_key_heads_in_order(attend):
    query, key, value = make_arrays(N=6, K=2)
    grouped = jax.jit(attend)(query, key, value)
    repeated = jax.jit(attend)(query, np.repeat(key, 3, axis=2), np.repeat(value, 3, axis=2))
    assert_near("output", grouped, repeated, 1e-6)
    assert_matches_oracle(attend, query, key, value, is_causal=True)


def test_no_batch_dimension(attend):
    query, key, value = make_arrays(B=1)
    bias = np.random.default_rng(2).normal(size=(4, 1, 61)).astype(np.float32)
    batched = jax.jit(lambda *args: attend(*args, is_causal=True, return_log_norm=True))
    output, log_norm = batched(query[0], key[0], value[0], bias)
    expected, expected_log_norm = batched(query, key, value, bias)
    assert output.shape == (50, 4, 16) and log_norm.shape == (50, 4)
    np.testing.assert_array_equal(output, expected[0])
    np.testing.assert_array_equal(log_norm, expected_log_norm[0])


@pytest.mark.parametrize("offset", [11, -4, np.array(11, np.int32), np.array([11, -4], np.int32)], ids=str)
def test_offsets_traced_or_not(attend, offset):
    # Arrays are traced in this comparison, Python numbers are not.
    options = {"query_offset": offset, "local_window_size": (9, None), "is_causal": True}
    assert_matches_oracle(attend, *make_arrays(), **options)


def test_one_program_serves_every_offset(attend):
    arrays = make_arrays(T=1)
    traces = []

    @jax.jit
    def decode(offset):
        traces.append(offset)
        return attend(*arrays, is_causal=True, query_offset=offset)

    for offset in (0, 5, 60):
        expected = jax.jit(attend)(arrays[0], *(x[:, : offset + 1] for x in arrays[1:]))
        assert_near("output", decode(jnp.int32(offset)), expected, 1e-6)
    assert len(traces) == 1


def test_query_ids_alone_serve_both_sides(attend):
    query, key, value = make_arrays(T=50, S=50)
    ids = np.repeat([[0, 1, 2]], [15, 20, 15], axis=1).repeat(2, 0).astype(np.int32)
    alone = attend(query, key, value, query_segment_ids=ids)
    np.testing.assert_array_equal(
        alone, attend(query, key, value, query_segment_ids=ids, key_value_segment_ids=ids)
    )
    assert_matches_oracle(attend, query, key, value, query_segment_ids=ids)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_dtypes_of_the_results(attend, dtype):
    arrays = [jnp.asarray(x, dtype) for x in make_arrays()]
    call = jax.jit(lambda *args: attend(*args, return_log_norm=True))
    (output, log_norm), pullback = jax.vjp(call, *arrays)
    assert output.dtype == dtype and log_norm.dtype == jnp.float32
    gradients = pullback((output, log_norm))
    assert all(gradient.dtype == dtype for gradient in gradients)


def test_the_log_norm_is_as_exact_as_float32_for_narrow_inputs(attend):
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in make_arrays()]
    _, log_norm = attend(*arrays, return_log_norm=True)
    wide = [np.asarray(x, np.float32) for x in arrays]
    _, expected = attend(*wide, return_log_norm=True)
    assert_near("log norm", log_norm, expected, 2e-6)


def test_attention_weights_are_those_of_the_output():
    query, key, value = make_arrays()
    options = {"is_causal": True, "query_offset": 5, "normalizer": attnorm.get_normalizer("sink", b=1.0)}
    weights = attnorm.attention_weights(query, key, precision="highest", **options)
    assert weights.shape == (2, 4, 50, 61)
    expected = attnorm.dot_product_attention(query, key, value, precision="highest", **options)
    got = jnp.einsum("bnts,bsnh->btnh", weights, np.repeat(value, 2, axis=2), precision="highest")
    assert_near("output", got, expected, 2e-6)
