"""Float64 oracles in NumPy, written from the published formulas. They share no code with the package.

A hidden key is removed from its row before anything is computed, so what stands there cannot matter.

ORACLES have their backward written out, and serve plain JAX too. FORMULAS are written for one row in NumPy alone, with
complex numbers allowed: their gradients are the imaginary parts of results at inputs moved by 1e-30 i, exact to
rounding because nothing is subtracted.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.oracles_solver import SOLVER


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


class Row(NamedTuple):
    """Of one query: the number of keys it may see, its position, and the positions of the keys it weighs."""

    n: int
    position: float
    keys: np.ndarray

    @staticmethod
    def of(keys, position):
        return Row(max(len(keys), 1), float(position), np.asarray(keys, np.float64))


class Formula(NamedTuple):
    """A normaliser by its formula alone: (logits, row, **params) -> weights, or weights and log norm.

    logits: of the keys of `row` along the last axis, real or complex. choices: as for Oracle; text and whole numbers
    stay what they are.
    """

    formula: Callable
    choices: tuple[dict[str, Any], ...] = ({},)
    has_log_norm: bool = False

    def weights(self, logits, row, **params):
        if not logits.shape[-1]:
            return logits, np.full(logits.shape[:-1], -np.inf)
        if self.has_log_norm:
            return self.formula(logits, row, **params)
        return self.formula(logits, row, **params), np.zeros(logits.shape[:-1])

    def backward(self, logits, row, d_weights, d_log_norm, **params):
        def moved(logits, **moved_params):
            weights, log_norm = self.weights(logits, row, **params | moved_params)
            parts = weights.imag * d_weights / STEP, log_norm.imag * d_log_norm / STEP
            return parts[0].sum(-1) + parts[1], np.abs(parts[0]).sum(-1) + np.abs(parts[1])

        d_logits, terms = moved(logits + 1j * STEP * np.eye(len(logits)))
        results = {
            name: moved(logits + 0j, **{name: x + 1j * STEP})
            for name, x in params.items()
            if isinstance(x, float)
        }
        return Backward(
            d_logits,
            {name: float(slope) for name, (slope, _) in results.items()},
            terms,
            {name: float(size) for name, (_, size) in results.items()},
        )


STEP = 1e-30


def positive_part(x):
    return np.where(x.real > 0, x, 0)


def magnitude(x):
    return np.where(x.real < 0, -x, x)


def erfc(x):
    """To first order in the imaginary part."""
    real = np.vectorize(math.erfc, otypes=[float])(x.real)
    return real if np.isrealobj(x) else real - 1j * x.imag * 2 / np.sqrt(np.pi) * np.exp(-(x.real**2))


def gelu(x):
    return x * erfc(-x / np.sqrt(2)) / 2


def log_one_plus_exp(x):
    return positive_part(x) + np.log1p(np.exp(-magnitude(x)))


def logistic(x):
    small = np.exp(-magnitude(x))
    return np.where(x.real < 0, small, 1) / (1 + small)


def sum_of(x):
    return np.sum(x, axis=-1, keepdims=True)


def softmax_row(logits):
    """Weights and log norm."""
    largest = np.max(logits.real, axis=-1, keepdims=True, initial=-np.inf)
    exponentials = np.exp(logits - largest)
    total = sum_of(exponentials)
    return exponentials / total, (largest + np.log(total))[..., 0]


def ssmax(logits, row, h=0.168, c=0.0):
    return softmax_row(logits * (h * np.log(row.n) + c))


def log_n(logits, row, n_train=1024.0, floor=0.0):
    factor = np.log(row.n) / np.log(n_train)
    return softmax_row(logits * (factor if np.real(factor) > np.real(floor) else floor))


def sqrt_log_n(logits, row):
    return softmax_row(logits * np.sqrt(2 * np.log(row.n)))


def critical(logits, row, gamma=1.0):
    return softmax_row(gamma * np.log(row.n) * logits)


def yarn(logits, row, r=1.0):
    """The code multiplies queries and keys by 0.1 log r + 1 each."""
    mscale = 0.1 * np.log(r) + 1
    return softmax_row(logits * mscale * mscale)


def llama4(logits, row, attn_scale=0.1, floor_scale=8192.0):
    steps = np.floor((max(row.position, 0) + 1) / np.real(floor_scale))
    return softmax_row(logits * (np.log(steps + 1) * attn_scale + 1))


def scale_invariant(logits, row, tau=10.0):
    growth = np.log(1 + np.abs(row.position - row.keys) / tau)
    return softmax_row(np.sqrt(2 * growth + 1) * logits - 2 * growth)


def alibi(logits, row, slope=0.5):
    return softmax_row(logits - slope * np.abs(row.position - row.keys))


def sa_softmax(logits, row):
    first = np.argmin(logits.real, axis=-1)[..., None]
    last = np.argmax(logits.real, axis=-1)[..., None]
    lowest, highest = (np.take_along_axis(logits, at, axis=-1) for at in (first, last))
    low, high = -positive_part(-lowest), positive_part(highest)
    weights = softmax_row(logits)[0]
    return np.where(high - low == 0, 0, (logits - low) / (high - low) * weights)


def affine(logits, row, alpha=1.0, alpha_ma=1.0):
    return alpha * softmax_row(logits)[0] + (alpha_ma - alpha) / logits.shape[-1]


def general(logits, row, F="softplus", p=1.0, T=1.0):
    s = logits / T
    if F == "exp":  # any factor of F leaves the weights as they are
        s = s - np.max(s.real, axis=-1, keepdims=True, initial=-np.inf)
    values = {
        "exp": np.exp,
        "softplus": log_one_plus_exp,
        "sigmoid": logistic,
        "one_plus_square": lambda s: 1 + s**2,
        "relu": positive_part,
        "squared_relu": lambda s: positive_part(s) ** 2,
        "gelu": gelu,
    }[F](s)
    size = magnitude(values)
    powers = np.where(size == 0, 0, np.exp(p * np.log(np.where(size == 0, 1, size))))
    norm = sum_of(powers)
    return np.where(norm == 0, 0, values / np.where(norm == 0, 1, norm) ** (1 / p))


def gelu_l2(logits, row):
    values = gelu(logits)
    norm = np.sqrt(sum_of(values**2))
    return np.where(norm == 0, 0, np.sqrt(row.n) * values / np.where(norm == 0, 1, norm))


def l2_gelu(logits, row):
    norm = np.sqrt(sum_of(logits**2))
    return gelu(np.where(norm == 0, 0, np.sqrt(row.n) * logits / np.where(norm == 0, 1, norm)))


def sigmoid(logits, row, b=None):
    return logistic(logits + (-np.log(row.n) if b is None else b))


def relu(logits, row, alpha=1.0):
    return positive_part(logits) / row.n**alpha


def squared_relu(logits, row, alpha=1.0):
    return positive_part(logits) ** 2 / row.n**alpha


def softplus(logits, row, alpha=1.0):
    return log_one_plus_exp(logits) / row.n**alpha


def reluformer(logits, row, gamma=1.0):
    return positive_part(logits) / (gamma * np.sqrt(row.n / 2))


def softpick(logits, row, eps=1e-8):
    """Divided through by the largest exponential, the one that is subtracted included."""
    shift = np.exp(-np.maximum(np.max(logits.real, axis=-1, keepdims=True, initial=0), 0))
    largest = -np.log(shift)
    # e^s - 1 with all its digits.
    differences = np.where(
        logits.real > 0,
        -np.expm1(-positive_part(logits)) * np.exp(positive_part(logits) - largest),
        np.expm1(-positive_part(-logits)) * shift,
    )
    total = sum_of(magnitude(differences)) + eps * shift
    return np.where(total == 0, 0, positive_part(differences) / np.where(total == 0, 1, total))


def nap(logits, row, gain=1.0, bias=0.0, eps=1e-5):
    centred = logits - sum_of(logits) / logits.shape[-1]
    return gain * centred / np.sqrt(sum_of(centred**2) / logits.shape[-1] + eps) + bias


def threshold_rectified(logits, row, beta=1.0, d=64.0):
    return positive_part(logits - beta * np.sqrt(2 * np.log(row.n) / d)) ** 2


def polynomial(logits, row, k=3):
    return logits**k / np.sqrt(row.n)


FORMULAS = {
    "ssmax": Formula(ssmax, ({}, {"h": (0.2, 0.6), "c": np.array(0.4)}), True),
    "log_n": Formula(log_n, ({"n_train": 8.0}, {"n_train": (3.0, 40.0), "floor": np.array(0.9)}), True),
    "sqrt_log_n": Formula(sqrt_log_n, has_log_norm=True),
    "critical": Formula(critical, ({}, {"gamma": (0.3, 1.5)}), True),
    "yarn": Formula(yarn, ({"r": 4.0}, {"r": (2.0, 30.0)}), True),
    "llama4": Formula(llama4, ({"floor_scale": 4.0}, {"attn_scale": (-0.1, 0.5), "floor_scale": 7.0}), True),
    "scale_invariant": Formula(scale_invariant, ({}, {"tau": (2.0, 20.0)}), True),
    "alibi": Formula(alibi, ({}, {"slope": (0.01, 0.3)}), True),
    "sa_softmax": Formula(sa_softmax),
    "affine": Formula(affine, ({"alpha": 1.5}, {"alpha": (0.5, 2.0), "alpha_ma": np.array(0.8)})),
    "general": Formula(
        general,
        (
            {},
            {"F": "gelu", "p": 2.0},
            {"F": "exp", "p": (0.75, 3.0), "T": np.array(1.7)},
            {"F": "one_plus_square", "p": np.array(1.5), "T": (0.5, 2.0)},
            {"F": "sigmoid", "p": 3.0},
            {"F": "relu", "p": np.array(2.0)},
            {"F": "squared_relu"},
        ),
    ),
    "gelu_l2": Formula(gelu_l2),
    "l2_gelu": Formula(l2_gelu),
    "sigmoid": Formula(sigmoid, ({}, {"b": -1.0}, {"b": (-3.0, 1.0)})),
    "relu": Formula(relu, ({}, {"alpha": (0.5, 1.2)})),
    "squared_relu": Formula(squared_relu, ({"alpha": 0.5},)),
    "softplus": Formula(softplus, ({"alpha": np.array(0.9)},)),
    "reluformer": Formula(reluformer, ({}, {"gamma": (0.5, 2.0)})),
    "softpick": Formula(softpick, ({}, {"eps": (0.1, 2.0)})),
    "nap": Formula(
        nap, ({"eps": 0.1}, {}, {"gain": (0.5, 2.0), "bias": np.array(0.3), "eps": np.array(0.1)})
    ),
    "threshold_rectified": Formula(
        threshold_rectified, ({"d": 8.0}, {"beta": (0.2, 1.0), "d": np.array(9.0)})
    ),
    "polynomial": Formula(polynomial, ({}, {"k": 2})),
}
FORMULAS |= {name: Formula(formula, choices) for name, (formula, choices) in SOLVER.items()}


def choices(name):
    """Every (name, params) that the tests try for one normaliser."""
    if name not in ORACLES | FORMULAS:
        raise AssertionError(
            f"normaliser {name!r} is in attnorm.normalizer_names() but has no entry in tests/oracles.py: "
            "add its published formula to FORMULAS"
        )
    return [(name, params) for params in (ORACLES | FORMULAS)[name].choices]


def as_arrays(params, heads):
    """Parameters as the package takes them: arrays in float32, one number per head for a pair."""
    return {
        k: np.linspace(*x, heads, dtype=np.float32)
        if isinstance(x, tuple)
        else x.astype(np.float32)
        if isinstance(x, np.ndarray)
        else x
        for k, x in params.items()
    }


def row_weights(name, logits, row, params):
    """Weights and log norm of one row of visible logits."""
    if name in ORACLES:
        return ORACLES[name].weights(np, logits, **params)
    return FORMULAS[name].weights(logits, row, **params)


def row_backward(name, logits, row, d_weights, d_log_norm, params):
    if name in ORACLES:
        return ORACLES[name].backward(logits, d_weights, d_log_norm, **params)
    return FORMULAS[name].backward(logits, row, d_weights, d_log_norm, **params)


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
    query_offset=0,
    d_output=None,
    d_log_norm=None,
):
    """Dense attention, layout as in the package, one row at a time; `params` hold scalars or (N,) arrays."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    batch, queries, heads, width = query.shape
    keys, key_heads = key.shape[1:3]
    scale = width**-0.5 if scale is None else scale
    offsets = np.broadcast_to(query_offset, (batch,))
    fixed = {name: x for name, x in params.items() if isinstance(x, str | int)}
    params = {name: x for name, x in params.items() if name not in fixed}
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

            row = Row(max(seen.size, 1), float(t + offsets[b]), seen)
            row_params = fixed | {name: float(x[n]) for name, x in head_params.items()}
            weights, log_norm[b, t, n] = row_weights(normalizer, logits, row, row_params)
            at = _slice_if_contiguous(seen)
            output[b, t, n] = weights @ value[b, at, h]

            d_weights = value[b, at, h] @ d_output[b, t, n]
            back = row_backward(normalizer, logits, row, d_weights, d_log_norm[b, t, n], row_params)
            ds, terms = back.logits * slope, back.logits_terms * slope
            d_logits[b, n, t, at] = ds
            logits_terms[b, n, t, at] = terms
            d_query[b, t, n] = scale * (ds @ key[b, at, h])
            d_key[b, at, h] += scale * np.outer(ds, query[b, t, n])
            d_value[b, at, h] += np.outer(weights, d_output[b, t, n])
            query_terms[b, t, n] = scale * (terms @ np.abs(key[b, at, h]))
            key_terms[b, at, h] += scale * np.outer(terms, np.abs(query[b, t, n]))
            value_terms[b, at, h] += np.outer(np.abs(weights), np.abs(d_output[b, t, n]))
            for name in params:
                d_params[name][n] += back.params.get(name, 0.0)
                params_terms[name][n] += back.params_terms.get(name, 0.0)

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
