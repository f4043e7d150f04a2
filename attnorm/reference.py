"""Dense attention for any normaliser: plain, differentiable any number of times, O(T S) memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnorm.dropout import Dropout
from attnorm.finite import finite_or_zero, has_nonfinite, nan_where
from attnorm.masks import Visibility
from attnorm.normalizers.rule import Normalizer, evaluate
from attnorm.places import dense_place

SERVES = frozenset({"map", "position", "count", "distance", "rows", "numerators", "erf", "level"})


def weights(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    bias: Float[Array, "b n t s"] | None,
    visibility: Visibility,
    normalizer: Normalizer,
    *,
    scale: float,
    logits_soft_cap: float | None,
    precision,
) -> tuple[Float[Array, "B N T S"], Float[Array, "B N T"] | None]:
    """The normalised weights and the log-norm, both in float32 or wider. ``normalizer`` has (N,) parameters."""
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    visible = visibility.dense()
    key = jnp.repeat(key, query.shape[2] // key.shape[2], axis=2)
    logits = jnp.einsum(
        "BTNH,BSNH->BNTS",
        finite_or_zero(query),
        finite_or_zero(key),
        precision=precision,
        preferred_element_type=dtype,
    )
    query_marked = jnp.swapaxes(has_nonfinite(query), 1, 2)[..., :, None]
    key_marked = jnp.swapaxes(has_nonfinite(key), 1, 2)[..., None, :]
    logits = logits * scale + nan_where(query_marked | key_marked, dtype)
    if bias is not None:
        logits = logits + bias.astype(dtype)
    if logits_soft_cap is not None:
        if visible is not None:  # before the cap, whose slope at a hidden NaN is NaN
            logits = jnp.where(visible, logits, 0)
        logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    rule = jax.tree.map(lambda leaf: leaf[:, None, None] if leaf.ndim else leaf, normalizer)
    place = dense_place(normalizer, visibility, dtype)
    normalized, log_norm = evaluate(rule, logits, visible, place)
    if visible is not None:
        normalized = jnp.where(visible, normalized, 0)
    return normalized, None if log_norm is None else jnp.squeeze(log_norm, -1)


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Float[Array, "b n t s"] | None,
    visibility: Visibility,
    normalizer: Normalizer,
    *,
    scale: float,
    logits_soft_cap: float | None,
    dropout: Dropout | None,
    precision,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"] | None]:
    """Output in query's dtype, and the log-norm in float32 or wider."""
    normalized, log_norm = weights(
        query,
        key,
        bias,
        visibility,
        normalizer,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        precision=precision,
    )
    if dropout is not None:
        B, N, T, S = normalized.shape
        normalized = normalized * dropout.tile((B, N), 0, T, 0, S).astype(normalized.dtype)
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    output = jnp.einsum(
        "BNTS,BSNH->BTNH",
        normalized,
        finite_or_zero(value).astype(normalized.dtype),
        precision=precision,
    )
    marked = jnp.swapaxes(has_nonfinite(value), 1, 2)[:, :, None, :]
    visible = visibility.dense()
    if visible is not None:
        marked = marked & visible
    sees_marked = jnp.any(marked, axis=-1, keepdims=True)
    output = output + nan_where(jnp.swapaxes(sees_marked, 1, 2), output.dtype)
    if visible is not None:  # a row that sees no key has no gradient, not even that of a NaN cotangent
        output = jnp.where(jnp.swapaxes(jnp.any(visible, axis=-1, keepdims=True), 1, 2), output, 0)
    return output.astype(query.dtype), None if log_norm is None else jnp.swapaxes(log_norm, 1, 2)
