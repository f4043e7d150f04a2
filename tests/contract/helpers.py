"""Inputs, and comparison with the oracle in float32 at ordinary logits."""

import jax
import jax.numpy as jnp
import numpy as np

import attnorm
from tests import oracles


def make_arrays(B=2, T=50, S=61, N=4, K=2, H=16, Hv=None, seed=0):
    """query, key and value in NumPy float32."""
    rng = np.random.default_rng(seed)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, Hv or H)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


def make_program(attend, *, normalizer="l2", params=None, cotangents, log_norm=True, **options):
    """A compiled function of a dict of query, key, value and perhaps bias -> output, log norm, gradients.

    Options given as arrays are traced, and so are the parameters given as arrays.
    """
    params = params or {}
    static = {k: x for k, x in params.items() if isinstance(x, float | int | str)}
    leaves = {k: jnp.asarray(x) for k, x in params.items() if k not in static}
    traced = {k: x for k, x in options.items() if isinstance(x, np.ndarray)}
    fixed = {k: x for k, x in options.items() if k not in traced}

    @jax.jit
    def value_and_gradients(arrays, leaves, traced, cotangents):
        def function(arrays, leaves):
            rule = attnorm.get_normalizer(normalizer, **static, **leaves)
            return attend(**arrays, **traced, **fixed, normalizer=rule, return_log_norm=log_norm)

        results, pullback = jax.vjp(function, arrays, leaves)
        d_arrays, d_leaves = pullback(cotangents if log_norm else cotangents[0])
        return results, d_arrays | d_leaves

    def program(arrays):
        results, gradients = jax.device_get(value_and_gradients(arrays, leaves, traced, cotangents))
        return *(results if log_norm else (results, None)), gradients

    return program


def run(attend, arrays, **options):
    """Output, log norm and gradients, once."""
    return make_program(attend, **options)(arrays)


def make_cotangents(query, value, seed=1):
    B, T, N, _ = query.shape
    rng = np.random.default_rng(seed)
    d_output, d_log_norm = rng.normal(size=(B, T, N, value.shape[-1])), rng.normal(size=(B, T, N))
    return d_output.astype(np.float32), d_log_norm.astype(np.float32)


def assert_matches_oracle(attend, query, key, value, bias=None, *, tolerance=2e-6, cancelling=(), **options):
    """Output, log norm and every gradient, to `tolerance` of the largest value; -> output, gradients.

    cancelling: names of gradients that add up far larger terms, see `assert_near`.
    """
    arrays = {"query": query, "key": key, "value": value} | ({} if bias is None else {"bias": bias})
    options = {"cotangents": make_cotangents(query, value)} | options
    result = run(attend, arrays, **options)
    assert_results_near(result, oracle(arrays, **options), tolerance, cancelling=cancelling)
    output, _, gradients = result
    return output, gradients


def oracle(arrays, *, normalizer="l2", params=None, cotangents, log_norm=True, **options):
    """The oracle's result for the same arguments as `run`."""
    query, key = arrays["query"], arrays["key"]
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    kept = {k: options.pop(k) for k in ("scale", "logits_soft_cap") if k in options}
    return oracles.attention(
        **arrays,
        normalizer=normalizer,
        params=params or {},
        visible=oracles.visible_keys(shape, **options),
        query_offset=options.get("query_offset", 0),
        d_output=cotangents[0],
        d_log_norm=cotangents[1] if log_norm else None,
        **kept,
    )


def assert_results_near(result, expected, tolerance, what="", cancelling=()):
    """Where the oracle is NaN (a number that somebody does see) nothing is compared."""
    output, log_norm, gradients = result
    assert_near(f"output{what}", output, expected.output, tolerance)
    if log_norm is not None:
        assert_near(f"log norm{what}", log_norm, expected.log_norm, tolerance)
    for name, got in gradients.items():
        terms = expected.terms[name] if name in cancelling else 0.0
        assert_near(f"gradient of {name}{what}", got, expected.gradients[name], tolerance, terms)


def assert_near(what, got, expected, tolerance, terms=0.0):
    """To `tolerance` of the largest value, or of 1 % of the terms that one entry adds up, if less is left of them."""
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    empty = np.isneginf(expected)
    assert (got[empty] == -np.inf).all(), f"{what}: {got[empty]} where -inf is expected"
    finite = np.isfinite(expected)
    if finite.any():
        size = max(np.max(np.abs(expected[finite])), 0.01 * terms)
        error = np.max(np.abs(got[finite] - expected[finite]))
        assert error <= tolerance * size, f"{what}: error {error:.3g} > {tolerance:.1g} of {size:.3g}"
