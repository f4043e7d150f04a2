"""What implementations do alike with the states of whole rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.rule import Normalizer, checked_terms

# Rows whose products are taken at once, to use one from each.
_ROWS_MULTIPLIED = 16


def sees_nothing(stats: tuple[Array, ...]) -> Bool[Array, "..."]:
    """Whether a row saw no key: it has no gradient then, not even that of a NaN cotangent."""
    return functools.reduce(jnp.logical_and, [h == 0 for h in stats])


def num_statistics(normalizer: Normalizer) -> int:
    """How many statistics a row has."""
    number = jnp.float32(0)
    numbers = jax.tree.map(lambda _: number, normalizer)
    return len(jax.eval_shape(lambda rule: checked_terms(rule, number, number), numbers)[1])


def row_products(
    a: Float[Array, "*rows T Hv"], b: Float[Array, "*rows T Hv"], precision, size: int = _ROWS_MULTIPLIED
) -> Float[Array, "*rows T"]:
    """<a, b> of every row, in the dtype of a; ``size`` rows are multiplied with each other at once.

    In a backward pass it is subtracted from products of one array and values, of which it is the largest part where
    a row sees few keys. So in float32 it is rounded as they are, a row of a matrix product, and they cancel.
    """
    if not a.dtype == b.dtype == jnp.float32:
        return jnp.sum(a * b.astype(a.dtype), axis=-1)
    *outer, rows, width = a.shape

    def in_parts(x):
        x = jnp.pad(x, [(0, 0)] * len(outer) + [(0, -rows % size), (0, 0)])
        return x.reshape(*outer, -1, size, width)

    products = jnp.einsum("...ih,...jh->...ij", in_parts(b), in_parts(a), precision=precision)
    return jnp.diagonal(products, axis1=-2, axis2=-1).reshape(*outer, -1)[..., :rows]


def row_gradients(
    normalizer: Normalizer,
    stats: tuple[Float[Array, "..."], ...],
    m: Float[Array, "..."],
    delta: Float[Array, "..."] | tuple[Float[Array, "..."], ...],
    d_log_norm: Float[Array, "..."] | None,
) -> tuple[Array | tuple[Array, ...], tuple[Array, ...], Normalizer]:
    """The row factor g, and the gradients of the statistics and of the parameters: the finaliser's backward.

    ``delta`` is <d_output, output> of a row: the gradient of g, times g. Of several numerators there is a tuple of
    factors, and ``delta`` is one of <d_output, Σ f v>, their gradients.
    """
    g, pull_factor = jax.vjp(lambda stats, rule: rule.finalize(stats, m), stats, normalizer)
    d_g = delta if isinstance(delta, tuple) else delta / jnp.where(g == 0, 1, g)
    d_stats, d_normalizer = pull_factor(d_g)
    if d_log_norm is not None:
        _, pull_log_norm = jax.vjp(lambda stats, rule: rule.log_norm(stats, m), stats, normalizer)
        more = pull_log_norm(d_log_norm.astype(stats[0].dtype))
        d_stats, d_normalizer = jax.tree.map(jnp.add, (d_stats, d_normalizer), more)
    return g, d_stats, d_normalizer


def sum_gradients(
    d_output: Float[Array, "... Hv"], factor: Float[Array, "... 1"] | tuple[Float[Array, "... 1"], ...]
) -> Float[Array, "... Hv"]:
    """The gradient of Σ f v; of several, ``d_output``, which each factor is still to multiply.

    Where the row state is NaN, f is at every key that the row sees; a NaN here would reach the hidden ones too.
    """
    if isinstance(factor, tuple):
        return jnp.where(jnp.isnan(sum(factor)), 0, d_output)
    return jnp.where(jnp.isnan(factor), 0, d_output * factor)
