"""Each key, from the nearest on, takes its share of what the nearer ones have left."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.rule import Normalizer


@dataclass(frozen=True)
class StickBreaking(Normalizer):
    """The rule of :func:`stick_breaking`. The order of the keys matters."""

    needs = frozenset({"rows"})

    def row_weights(self, s, visible, place, axis):
        left = jnp.where(visible, jax.nn.log_sigmoid(-s), 0)
        left_by_later = jax.lax.cumsum(left, axis % s.ndim, reverse=True) - left
        return jnp.exp(jax.nn.log_sigmoid(s) + left_by_later)


def stick_breaking(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Stick-breaking: ``σ(s_j) Π_{k>j} (1 - σ(s_k))`` over the visible keys, the last one first.

    With a causal mask the nearest key takes first, so weights know about recency without position encodings. They
    sum to at most 1. Published for keys strictly before the query: mask the diagonal, or give
    ``query_offset=-1`` with ``is_causal``. The order of the keys matters, so no kernel serves it.

    Args:
      logits: floating point, any shape.
      axis: the axis of the keys, in order.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype. They have no log-norm.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: a shape that does not broadcast.

    Source: arXiv 2410.17980.

    >>> import jax.numpy as jnp
    >>> from attnorm import stick_breaking
    >>> print(stick_breaking(jnp.zeros(3)))
    [0.125 0.25  0.5  ]
    """
    return StickBreaking().weights(logits, axis=axis, where=where)
