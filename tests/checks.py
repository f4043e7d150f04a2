"""How close a result must come to the oracle, and the plain JAX attention whose error sets the measure."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.oracles import ORACLES


def assert_close(what, got, expected, plain, *, scale, largest_logit, eps=None, strict=False):
    """err <= 3 err_plain + 4 eps (1 + max|s|) scale, entry by entry where the oracle is a number.

    got: the result under test; expected: the float64 oracle; plain: plain JAX in got's dtype.
    scale: size of the terms that one entry adds up; eps: of got's dtype unless given.
    strict: also max|err| <= 2e-6 max|expected|, unless cancellation leaves less than 1 % of the terms.
    Infinities must agree; where the oracle is NaN (a hidden NaN that somebody may see) all is accepted.
    """
    eps = float(jnp.finfo(got.dtype).eps) if eps is None else eps
    got, expected, plain = (np.asarray(x, np.float64) for x in (got, expected, plain))
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, the oracle has {expected.shape}"
    assert plain.shape == expected.shape, (
        f"{what}: plain has shape {plain.shape}, the oracle {expected.shape}"
    )
    infinite = np.isinf(expected)
    assert (got[infinite] == expected[infinite]).all(), f"{what}: {got[infinite]} where {expected[infinite]}"
    finite = np.isfinite(expected)
    if not finite.any():
        return
    bad = finite & ~np.isfinite(got)
    assert not bad.any(), f"{what}: {bad.sum()} of {bad.size} entries are not finite, first at {_first(bad)}"
    error = np.where(finite, np.abs(got - np.where(finite, expected, 0)), 0)
    plain_error = np.max(np.abs(plain[finite] - expected[finite]))
    assert np.isfinite(plain_error), f"{what}: plain JAX is not finite here, so the case measures nothing"
    bound = 3 * plain_error + 4 * eps * (1 + largest_logit) * scale
    at = np.unravel_index(np.argmax(error), error.shape)
    assert error[at] <= bound, (
        f"{what}: error {error[at]:.3g} > {bound:.3g} at {tuple(map(int, at))}: got {got[at]:.9g}, "
        f"oracle {expected[at]:.9g} (plain error {plain_error:.3g}, scale {scale:.3g})"
    )
    size = np.max(np.abs(expected[finite]))
    if strict and size > 0.01 * scale:
        assert error[at] <= 2e-6 * size, f"{what}: relative error {error[at] / size:.3g} > 2e-6"


def _first(where):
    return tuple(map(int, np.argwhere(where)[0]))


def plain_attention(
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
):
    """Textbook attention in plain JAX -> output, log norm; `visible` is a bool (B, N, T, S) array.

    Hidden keys and values must be finite here.
    """
    heads, key_heads = query.shape[2], key.shape[2]
    key, value = (jnp.repeat(x, heads // key_heads, axis=2) for x in (key, value))
    accumulator = jnp.promote_types(query.dtype, jnp.float32)
    logits = jnp.einsum(
        "btnh,bsnh->bnts", query, key, precision="highest", preferred_element_type=accumulator
    ) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        logits = logits + bias.astype(accumulator)
    if logits_soft_cap is not None:
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    # Hidden logits are finite, so that the slope of exp(p s) with respect to p is 0 there and not inf * 0.
    visible = visible & (logits > -jnp.inf)
    logits = jnp.where(visible, logits, -1e30)
    params = {k: jnp.reshape(x, (-1, 1, 1)) if jnp.ndim(x) else x for k, x in params.items()}
    weights, log_norm = ORACLES[normalizer].weights(jnp, logits, **params)
    weights = jnp.where(visible, weights, 0).astype(query.dtype)
    log_norm = jnp.where(log_norm < -1e29, -jnp.inf, log_norm)
    output = jnp.einsum("bnts,bsnh->btnh", weights, value, precision="highest")
    return output, jnp.moveaxis(log_norm, 1, 2)


def double_precision():
    """Context in which JAX keeps float64."""
    return jax.enable_x64(True)
