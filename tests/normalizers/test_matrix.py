"""Weights that depend on more than one row of logits, against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm.normalizers.matrix import (
    differential,
    differential_init,
    differential_lambda,
    selective,
    sinkhorn,
)
from tests.checks import double_precision


def softmax(logits, where):
    exponentials = np.where(where, np.exp(logits), 0)
    return exponentials / np.maximum(exponentials.sum(-1, keepdims=True), 1e-300)


def test_selective_votes_one_by_one():
    rng = np.random.default_rng(0)
    N, T = 2, 6
    logits = rng.normal(size=(3, N, T, T))
    where = rng.random((3, 1, T, T)) < 0.8
    logits[~np.broadcast_to(where, logits.shape)] = np.nan
    expected = np.zeros_like(logits)
    for b, n, i in np.ndindex(3, N, T):
        seen = where[b, 0, i, : i + 1]
        row = np.where(seen, logits[b, n, i, : i + 1], 0)
        for j in range(1, i):
            voters = [k for k in range(j + 1, i) if where[b, 0, k, j]]
            row[j] -= sum(max(logits[b, 0, k, j], 0) for k in voters)
        expected[b, n, i, : i + 1] = softmax(row, seen)
    with double_precision():
        got = jax.jit(lambda s: selective(s, where=where))(jnp.asarray(logits))
        slopes = jax.jit(jax.grad(lambda s: jnp.sum(selective(s, where=where) ** 2)))(jnp.asarray(logits))
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)
    assert np.isfinite(slopes).all()
    with pytest.raises(ValueError, match=r"\(\.\.\., N, T, T\), got \(2, 3, 4\)"):
        selective(jnp.zeros((2, 3, 4)))


def test_sinkhorn_divides_rows_and_columns_in_turn():
    rng = np.random.default_rng(3)
    logits, where = 2 * rng.normal(size=(2, 5, 5)), rng.random((5, 5)) < 0.8
    where[2], where[:, 3] = False, False
    expected = np.where(where, np.exp(logits), 0)
    for axis in (-1, -2, -1):
        total = expected.sum(axis, keepdims=True)
        expected = expected / np.where(total == 0, 1, total)
    logits[:, ~where] = np.nan
    with double_precision():
        got = jax.jit(lambda s: sinkhorn(s, where=where))(jnp.asarray(logits))
        slopes = jax.jit(jax.grad(lambda s: jnp.sum(sinkhorn(s, where=where) ** 2)))(jnp.asarray(logits))
        many = jax.device_get(sinkhorn(jnp.asarray(rng.normal(size=(5, 5))), iterations=101))
        one = sinkhorn(jnp.asarray(np.nan_to_num(logits)), iterations=1)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-15)
    assert np.isfinite(slopes).all()
    np.testing.assert_allclose([many.sum(0), many.sum(1)], 1, rtol=1e-9)
    np.testing.assert_allclose(one, softmax(np.nan_to_num(logits), np.ones((5, 5), bool)), rtol=1e-12)
    with pytest.raises(ValueError, match="iterations must be odd and positive, got 2"):
        sinkhorn(logits, iterations=2)


def test_differential():
    rng = np.random.default_rng(1)
    logits, other = rng.normal(size=(2, 4, 9))
    where = rng.random((4, 9)) < 0.7
    query, key = rng.normal(size=(2, 2, 5))
    init = differential_init(3)
    lam = np.exp(query[0] @ key[0]) - np.exp(query[1] @ key[1]) + 0.8 - 0.6 * np.exp(-0.9)
    with double_precision():
        got_lam = differential_lambda(jnp.asarray(query), jnp.asarray(key), init=init)
        got = differential(jnp.asarray(logits), jnp.asarray(other), lam=got_lam, where=where)
    np.testing.assert_allclose(
        got, softmax(logits, where) - lam * softmax(other, where), rtol=1e-11, atol=1e-13
    )
    with pytest.raises(ValueError, match=r"other .* \(4, 9\), got \(4, 8\)"):
        differential(logits, other[:, :8], lam=0.5)
    with pytest.raises(ValueError, match=r"lam must broadcast to logits \(4, 9\), got shape \(5, 1, 1\)"):
        differential(logits, other, lam=jnp.ones((5, 1, 1)))


@pytest.mark.parametrize("function", [selective, sinkhorn])
def test_what_is_hidden_is_checked_and_a_visible_nan_is_not_hidden(function):
    logits = np.zeros((2, 4, 4), np.float32)
    with pytest.raises(ValueError, match=r"where must broadcast to logits \(2, 4, 4\), got \(3, 1, 4, 4\)"):
        function(logits, where=np.ones((3, 1, 4, 4), bool))
    with pytest.raises(TypeError, match="where must be boolean, got int32"):
        function(logits, where=np.ones((4, 4), np.int32))
    logits[1, 3, 1] = np.nan
    assert np.isnan(np.asarray(function(logits))[1, 3]).any()
    seen = np.ones((4, 4), bool)
    seen[3, 1] = False
    assert np.isfinite(np.asarray(function(logits, where=seen))).all()
