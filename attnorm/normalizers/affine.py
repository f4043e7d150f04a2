"""Softmax, scaled and shifted, so that the sum of the weights is learned."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.lp import Lp
from attnorm.normalizers.rule import Normalizer, Place, checked_parameter, evaluate


@dataclass(frozen=True, eq=False)
class Affine(Normalizer):
    """:func:`affine` adds the same to every key, a second sum of values that no other rule has."""

    alpha: float | Array = 1.0
    alpha_ma: float | Array = 1.0

    needs = frozenset({"rows"})

    def __post_init__(self):
        for name in ("alpha", "alpha_ma"):
            value = checked_parameter(name, getattr(self, name), "finite", lambda x: abs(x) < math.inf)
            object.__setattr__(self, name, value)

    def row_weights(self, s, visible, place, axis):
        weights, _ = evaluate(Lp(1.0), s, visible, Place(), axis)
        n = jnp.maximum(jnp.sum(visible, axis, keepdims=True), 1)
        return self.alpha * weights + (self.alpha_ma - self.alpha) / n


def affine(
    logits: Float[Array, "..."],
    *,
    alpha: float | Array = 1.0,
    alpha_ma: float | Array = 1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Affine softmax: ``α softmax(s)_j + (α_ma - α) / n``, n the number of keys. Signed; rows sum to α_ma.

    Dense only.

    Args:
      logits: floating point, any shape.
      alpha, alpha_ma: numbers, or arrays of size 1 along ``axis`` that broadcast to the logits and receive their exact
        gradient. In the source α is a function of the query, here one per row at most, and α_ma its moving average.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed, and not counted.

    Returns:
      The weights, in the logits' shape and dtype. They have no log-norm.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: a parameter infinite or NaN, a shape that does not broadcast.

    Source: arXiv 2602.23057, from a secondary source: it could not be checked against its text.

    >>> import jax.numpy as jnp
    >>> from attnorm import affine
    >>> [round(float(x), 4) for x in affine(jnp.log(jnp.array([1.0, 3.0])), alpha=2.0)]
    [0.0, 1.0]
    """
    return Affine(alpha, alpha_ma).weights(logits, axis=axis, where=where)
