"""Softmax over the keys of the largest logits."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.lp import Lp
from attnorm.normalizers.rule import Normalizer, Place, evaluate, is_array, static_field


@dataclass(frozen=True)
class TopK(Normalizer):
    """The rule of :func:`top_k`."""

    k: int = static_field(64)

    needs = frozenset({"rows"})
    passes = 2

    def __post_init__(self):
        is_number = isinstance(self.k, numbers.Real) and not isinstance(self.k, bool)
        if is_array(self.k) or not is_number or not 1 <= self.k < math.inf or self.k != int(self.k):
            raise ValueError(f"k must be a whole number, at least 1, got {self.k!r}")
        object.__setattr__(self, "k", int(self.k))

    def row_weights(self, s, visible, place, axis):
        size = s.shape[axis]
        if size == 0:
            return s
        ranked = jnp.sort(jnp.where(visible, s, -jnp.inf), axis=axis, descending=True)
        least = jnp.take(ranked, jnp.array([min(self.k, size) - 1]), axis=axis)
        # Not s >= least, so that NaN shows in the weights.
        return evaluate(Lp(1.0), s, visible & ~(s < least), Place(), axis)[0]


def top_k(
    logits: Float[Array, "..."],
    *,
    k: int = 64,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Softmax over the k keys of the largest logits: ``softmax(s_j if s_j >= the k-th largest logit else -inf)``.

    Keys that tie with the k-th are all kept. The k-th is known only after a first pass, so no kernel serves it.

    Args:
      logits: floating point, any shape.
      k: a whole number, at least 1; rows of fewer keys keep all.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype; they sum to 1. They have no log-norm.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: k not a whole number or less than 1, a shape that does not broadcast.

    Source: arXiv 1912.11637.

    >>> import jax.numpy as jnp
    >>> from attnorm import top_k
    >>> print(top_k(jnp.array([3.0, 1.0, 3.0, 2.0]), k=2))
    [0.5 0.  0.5 0. ]
    """
    return TopK(k).weights(logits, axis=axis, where=where)
