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


def run(attend, arrays, *, normalizer="l2", params=None, cotangents, log_norm=True, **options):
    """Output, log norm and gradients; `arrays` is a dict of query, key, value and perhaps bias."""
    params = params or {}
    leaves = {k: jnp.asarray(x) for k, x in params.items() if not isinstance(x, float)}
    static = {k: x for k, x in params.items() if isinstance(x, float)}
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

    results, gradients = jax.device_get(value_and_gradients(arrays, leaves, traced, cotangents))
    output, log_norm = results if log_norm else (results, None)
    return output, log_norm, gradients


def make_cotangents(query, value, seed=1):
    B, T, N, _ = query.shape
    rng = np.random.default_rng(seed)
    d_output, d_log_norm = rng.normal(size=(B, T, N, value.shape[-1])), rng.normal(size=(B, T, N))
    return d_output.astype(np.float32), d_log_norm.astype(np.float32)


def assert_matches_oracle(
    attend,
    query,
    key,
    value,
    bias=None,
    *,
    normalizer="l2",
    params=None,
    tolerance=2e-6,
    ignored=None,
    **options,
):
    """Output, log norm and every gradient, to `tolerance` of the largest value; -> output, gradients.

    Where the oracle is NaN or infinite (a hidden number that somebody does see) nothing is compared, nor at the
    indices that `ignored` names by gradient.
    """
    arrays = {"query": query, "key": key, "value": value} | ({} if bias is None else {"bias": bias})
    cotangents = make_cotangents(query, value)
    result = run(attend, arrays, normalizer=normalizer, params=params, cotangents=cotangents, **options)
    output, log_norm, gradients = result
    shape = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    kept = {k: options.pop(k) for k in ("scale", "logits_soft_cap") if k in options}
    expected = oracles.attention(
        **arrays,
        normalizer=normalizer,
        params=params or {},
        visible=oracles.visible_keys(shape, **options),
        d_output=cotangents[0],
        d_log_norm=cotangents[1],
        **kept,
    )
    for name, index in (ignored or {}).items():
        expected.gradients[name][index] = np.nan
    assert_near("output", output, expected.output, tolerance)
    assert_near("log norm", log_norm, expected.log_norm, tolerance)
    for name, got in gradients.items():
        assert_near(f"gradient of {name}", got, expected.gradients[name], tolerance)
    return output, gradients


def assert_near(what, got, expected, tolerance):
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    empty = np.isneginf(expected) & (what == "log norm")
    assert (got[empty] == -np.inf).all(), f"{what}: {got[empty]} in empty rows"
    finite = np.isfinite(expected)
    if finite.any():
        size = np.max(np.abs(expected[finite]))
        error = np.max(np.abs(got[finite] - expected[finite]))
        assert error <= tolerance * size, f"{what}: error {error:.3g} > {tolerance:.1g} of {size:.3g}"
