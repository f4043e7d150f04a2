"""What implementations do alike with the states of whole rows."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.rule import Normalizer


def sees_nothing(stats: tuple[Array, ...]) -> Bool[Array, "..."]:
    """Whether a row saw no key: it has no gradient then, not even that of a NaN cotangent."""
    return functools.reduce(jnp.logical_and, [h == 0 for h in stats])


def num_statistics(normalizer: Normalizer) -> int:
    """How many statistics a row has."""
    number = jnp.float32(0)
    numbers = jax.tree.map(lambda _: number, normalizer)
    return len(jax.eval_shape(lambda rule: rule.terms(number, number), numbers)[1])


def row_gradients(
    normalizer: Normalizer,
    stats: tuple[Float[Array, "..."], ...],
    m: Float[Array, "..."],
    delta: Float[Array, "..."],
    d_log_norm: Float[Array, "..."] | None,
) -> tuple[Array, tuple[Array, ...], Normalizer]:
    """The row factor g, and the gradients of the statistics and of the parameters: the finaliser's backward.

    ``delta`` is <d_output, output> of a row: the gradient of g, times g.
    """
    g, pull_factor = jax.vjp(lambda stats, rule: rule.finalize(stats, m), stats, normalizer)
    d_stats, d_normalizer = pull_factor(delta / jnp.where(g == 0, 1, g))
    if d_log_norm is not None:
        _, pull_log_norm = jax.vjp(lambda stats, rule: rule.log_norm(stats, m), stats, normalizer)
        more = pull_log_norm(d_log_norm.astype(jnp.float32))
        d_stats, d_normalizer = jax.tree.map(jnp.add, (d_stats, d_normalizer), more)
    return g, d_stats, d_normalizer
