"""Keeps NaN and inf at hidden positions out of matrix products, where 0 · NaN would let them through."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array


def finite_or_zero(x: Array) -> Array:
    """x with every NaN or inf replaced by 0."""
    return jnp.where(jnp.isfinite(x), x, 0)


def nan_where(condition: Array, dtype) -> Array:
    """NaN where the condition holds, else 0: added to a result, it marks without touching gradients."""
    return jnp.where(condition, jnp.nan, 0).astype(dtype)


def has_nonfinite(x: Array) -> Array:
    """Whether each row (last axis) holds a NaN or inf; the last axis is dropped."""
    return ~jnp.all(jnp.isfinite(x), axis=-1)
