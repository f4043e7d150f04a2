"""Float64 oracles in NumPy, written from the published formulas. They share no code with the package.

A hidden key is removed from its row before anything is computed, so what stands there cannot matter.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


class Oracle(NamedTuple):
    """One normaliser: its formulas and the parameters that the tests try.

    weights: (xp, logits, **params) -> weights, log norm, over the last axis; xp is numpy or jax.numpy.
    backward: (logits, d_weights, d_log_norm, **params) -> Backward, for one row of visible logits.
    choices: parameters; a float stays a Python number, an array is a leaf, a pair (low, high) becomes one
      value per head, evenly spaced.
    """

    weights: Callable
    backward: Callable
    choices: tuple[dict[str, Any], ...] = ({},)
    has_log_norm: bool = True


class Backward(NamedTuple):
    """Gradients of one row; `terms` are sums of the absolute values of what each gradient adds up."""

    logits: np.ndarray
    params: dict[str, float]
    logits_terms: np.ndarray
    params_terms: dict[str, float]


def exponential_backward(weights, slopes, params_slopes, d_weights, d_log_norm):
    """Backward of weights = exp(logits - log_norm), given the slopes of log_norm."""
    through_norm = d_log_norm - weights @ d_weights
    through_norm_terms = np.abs(d_log_norm) + weights @ np.abs(d_weights)
    return Backward(
        weights * d_weights + slopes * through_norm,
        {name: slope * through_norm for name, slope in params_slopes.items()},
        weights * np.abs(d_weights) + slopes * through_norm_terms,
        {name: np.abs(slope) * through_norm_terms for name, slope in params_slopes.items()},
    )


def softmax(xp, logits):
    largest = xp.max(logits, axis=-1, keepdims=True, initial=-xp.inf)
    exponentials = xp.exp(logits - largest)
    total = xp.sum(exponentials, axis=-1, keepdims=True)
    return exponentials / total, (largest + xp.log(total))[..., 0]


def softmax_backward(logits, d_weights, d_log_norm):
    weights, _ = softmax(np, logits)
    return exponential_backward(weights, weights, {}, d_weights, d_log_norm)


def lp(xp, logits, p):
    """exp(s) / (sum exp(s)^p)^(1/p); exp(s - max s) for p = inf."""
    largest = xp.max(logits, axis=-1, keepdims=True, initial=-xp.inf)
    exponentials = xp.exp(logits - largest)
    if isinstance(p, float) and np.isinf(p):
        return exponentials, largest[..., 0]
    total = xp.sum(xp.exp(p * (logits - largest)), axis=-1, keepdims=True)
    return exponentials * total ** (-1 / p), (largest + xp.log(total) / p)[..., 0]


def lp_backward(logits, d_weights, d_log_norm, p):
    weights, log_norm = lp(np, logits, p)
    if np.isinf(p):
        ties = logits == log_norm
        return exponential_backward(weights, ties / max(ties.sum(), 1), {}, d_weights, d_log_norm)
    powers, _ = softmax(np, p * logits)
    slope = -entropy(p * logits) / p**2
    row = exponential_backward(weights, powers, {"p": slope}, d_weights, d_log_norm)
    # An error e of a logit moves sum w (s - log norm) / p by w e / p, also where the entropy itself vanishes.
    terms = (1 + entropy(p * logits)) / p**2 * (np.abs(d_log_norm) + weights @ np.abs(d_weights))
    return row._replace(params_terms={"p": terms})


def entropy(logits):
    """Shannon entropy of softmax(logits), 0 without logits."""
    if not logits.size:
        return 0.0
    weights, log_norm = softmax(np, logits)
    return -weights @ (logits - log_norm)


def sink(xp, logits, b):
    """exp(s) / (exp(b) + sum exp(s))."""
    largest = xp.maximum(xp.max(logits, axis=-1, keepdims=True, initial=-xp.inf), b)
    exponentials = xp.exp(logits - largest)
    total = xp.exp(b - largest) + xp.sum(exponentials, axis=-1, keepdims=True)
    return exponentials / total, (largest + xp.log(total))[..., 0]


def sink_backward(logits, d_weights, d_log_norm, b):
    weights, log_norm = sink(np, logits, b)
    return exponential_backward(weights, weights, {"b": np.exp(b - log_norm)}, d_weights, d_log_norm)


def softmax_plus_n(xp, logits, n):
    """exp(s) / (n + sum exp(s))."""
    return sink(xp, logits, xp.log(n))


def softmax_plus_n_backward(logits, d_weights, d_log_norm, n):
    weights, log_norm = softmax_plus_n(np, logits, n)
    return exponential_backward(weights, weights, {"n": np.exp(-log_norm)}, d_weights, d_log_norm)


ORACLES = {
    "softmax": Oracle(softmax, softmax_backward),
    "l2": Oracle(
        lambda xp, logits: lp(xp, logits, 2.0),
        lambda logits, d_weights, d_log_norm: lp_backward(logits, d_weights, d_log_norm, 2.0)._replace(
            params={}, params_terms={}
        ),
    ),
    "lp": Oracle(
        lp,
        lp_backward,
        (
            {"p": 1.0},
            {"p": 1.5},
            {"p": 2.0},
            {"p": 4.0},
            {"p": float("inf")},
            {"p": np.array(0.5)},
            {"p": np.array(2.0)},
            {"p": (0.75, 6.0)},
        ),
    ),
    "linf": Oracle(
        lambda xp, logits: lp(xp, logits, float("inf")),
        lambda logits, d_weights, d_log_norm: lp_backward(logits, d_weights, d_log_norm, float("inf")),
    ),
    "softmax_plus_n": Oracle(
        softmax_plus_n,
        softmax_plus_n_backward,
        ({"n": 1.0}, {"n": 8.0}, {"n": np.array(0.5)}, {"n": (0.5, 20.0)}),
    ),
    "sink": Oracle(sink, sink_backward, ({"b": 0.0}, {"b": -2.0}, {"b": np.array(1.5)}, {"b": (-3.0, 3.0)})),
}


def choices(name):
    """Every (name, params) that the tests try for one normaliser."""
    if name not in ORACLES:
        raise AssertionError(
            f"normaliser {name!r} is in attnorm.normalizer_names() but has no entry in tests/oracles.py: "
            "add its published formula and its backward to ORACLES"
        )
    return [(name, params) for params in ORACLES[name].choices]


def visible_keys(
    shape,
    mask=None,
    is_causal=False,
    query_offset=0,
    local_window_size=None,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
):
    """Bool array of shape (B, N, T, S) = `shape`: may query i of a head see key j?"""
    batch, _, queries, keys = shape
    i = np.arange(queries)[None, None, :, None]
    j = np.arange(keys)[None, None, None, :]
    position = i + np.broadcast_to(query_offset, (batch,))[:, None, None, None]
    visible = np.ones(shape, bool)
    if mask is not None:
        visible &= np.asarray(mask)
    if is_causal:
        visible &= j <= position
    if local_window_size is not None:
        window = local_window_size
        left, right = window if isinstance(window, tuple) else (window, window)
        if left is not None:
            visible &= j >= position - left
        if right is not None:
            visible &= j <= position + right
    if query_seq_lengths is not None:
        visible &= i < np.asarray(query_seq_lengths)[:, None, None, None]
    if key_value_seq_lengths is not None:
        visible &= j < np.asarray(key_value_seq_lengths)[:, None, None, None]
    if query_segment_ids is not None:
        others = query_segment_ids if key_value_segment_ids is None else key_value_segment_ids
        ids = np.asarray(query_segment_ids)[:, None, :, None]
        visible &= ids == np.asarray(others)[:, None, None, :]
    return visible


class Attention(NamedTuple):
    """Result of the oracle. `gradients` and `terms` have keys query, key, value, bias and the parameters.

    `terms` holds, for each gradient, the largest sum of absolute values of what one of its entries adds up.
    """

    output: np.ndarray
    log_norm: np.ndarray
    gradients: dict[str, np.ndarray]
    terms: dict[str, float]
    largest_logit: float


def attention(
    query,
    key,
    value,
    bias=None,
    *,
    normalizer,
    params,
    visible,
    scale=None,
    logits_soft_cap=None,
    d_output=None,
    d_log_norm=None,
):
    """Dense attention, layout as in the package, one row at a time; `params` hold scalars or (N,) arrays."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, queries, heads, width = query.shape
    keys, key_heads = key.shape[1:3]
    scale = width**-0.5 if scale is None else scale
    oracle = ORACLES[normalizer]
    head_params = {name: np.broadcast_to(np.asarray(x, np.float64), (heads,)) for name, x in params.items()}
    if bias is not None:
        bias = np.asarray(bias, np.float64)
        dense_bias = np.broadcast_to(bias, (batch, heads, queries, keys))
    if d_output is None:
        d_output = np.zeros((batch, queries, heads, value.shape[-1]))
    if d_log_norm is None:
        d_log_norm = np.zeros((batch, queries, heads))
    d_output, d_log_norm = np.asarray(d_output, np.float64), np.asarray(d_log_norm, np.float64)

    output = np.zeros(d_output.shape)
    log_norm = np.zeros(d_log_norm.shape)
    largest_logit = 0.0
    d_query, d_key, d_value = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    query_terms, key_terms, value_terms = np.zeros_like(query), np.zeros_like(key), np.zeros_like(value)
    d_logits, logits_terms = np.zeros((2, batch, heads, queries, keys))
    d_params = {name: np.zeros(heads) for name in params}
    params_terms = {name: np.zeros(heads) for name in params}

    with np.errstate(all="ignore"):
        for b, n, t in np.ndindex(batch, heads, queries):
            h = n // (heads // key_heads)
            seen = np.flatnonzero(visible[b, n, t])
            logits = scale * (key[b, _slice_if_contiguous(seen), h] @ query[b, t, n])
            slope = np.ones_like(logits)
            if bias is not None:
                logits = logits + dense_bias[b, n, t, seen]
            if logits_soft_cap is not None:
                logits = logits_soft_cap * np.tanh(logits / logits_soft_cap)
                slope = 1 - (logits / logits_soft_cap) ** 2
            weightless = logits == -np.inf
            if weightless.any():
                seen, logits, slope = seen[~weightless], logits[~weightless], slope[~weightless]
            largest_logit = max(largest_logit, np.nanmax(np.abs(logits), initial=0.0))

            row_params = {name: float(x[n]) for name, x in head_params.items()}
            weights, log_norm[b, t, n] = oracle.weights(np, logits, **row_params)
            at = _slice_if_contiguous(seen)
            output[b, t, n] = weights @ value[b, at, h]

            d_weights = value[b, at, h] @ d_output[b, t, n]
            row = oracle.backward(logits, d_weights, d_log_norm[b, t, n], **row_params)
            ds, terms = row.logits * slope, row.logits_terms * slope
            d_logits[b, n, t, at] = ds
            logits_terms[b, n, t, at] = terms
            d_query[b, t, n] = scale * (ds @ key[b, at, h])
            d_key[b, at, h] += scale * np.outer(ds, query[b, t, n])
            d_value[b, at, h] += np.outer(weights, d_output[b, t, n])
            query_terms[b, t, n] = scale * (terms @ np.abs(key[b, at, h]))
            key_terms[b, at, h] += scale * np.outer(terms, np.abs(query[b, t, n]))
            value_terms[b, at, h] += np.outer(np.abs(weights), np.abs(d_output[b, t, n]))
            for name in params:
                d_params[name][n] += row.params.get(name, 0.0)
                params_terms[name][n] += row.params_terms.get(name, 0.0)

    gradients = {"query": d_query, "key": d_key, "value": d_value}
    terms = {"query": query_terms, "key": key_terms, "value": value_terms}
    if bias is not None:
        gradients["bias"] = sum_to_shape(d_logits, bias.shape)
        terms["bias"] = sum_to_shape(logits_terms, bias.shape)
    for name, x in params.items():
        gradients[name] = sum_to_shape(d_params[name], np.shape(x))
        terms[name] = sum_to_shape(params_terms[name], np.shape(x))
    largest = {name: float(np.nanmax(x, initial=0.0)) for name, x in terms.items()}
    return Attention(output, log_norm, gradients, largest, largest_logit)


def _slice_if_contiguous(seen):
    """A slice avoids copying the keys and values of a row."""
    if seen.size and seen[-1] - seen[0] + 1 == seen.size:
        return slice(seen[0], seen[-1] + 1)
    return seen


def sum_to_shape(array, shape):
    """Sum over the axes along which an array of `shape` was broadcast."""
    array = array.sum(axis=tuple(range(array.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and array.shape[axis] != 1)
    return array.sum(axis=axes, keepdims=True)
