"""Softmax, scaled and shifted, so that the sum of the weights is learned."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.rule import Normalizer, checked_parameter, of_weighted


@dataclass(frozen=True)
class Affine(Normalizer):
    """The rule: f = exp(s - m) and 1, and the statistics are their sums."""

    alpha: float | Array = 1.0
    alpha_ma: float | Array = 1.0

    learned = {"alpha": Learned(1.0), "alpha_ma": Learned(1.0)}
    needs = frozenset({"numerators"})

    def __post_init__(self):
        for name in ("alpha", "alpha_ma"):
            value = checked_parameter(name, getattr(self, name), "finite", lambda x: abs(x) < math.inf)
            object.__setattr__(self, name, value)

    def terms(self, s, m):
        def of_finite(s):
            f = jnp.exp(s - m), jnp.ones_like(s)
            return f, f

        return of_weighted(of_finite, s)

    def carry(self, sums, stats, m_old, m_new):
        factor = jnp.exp(m_old - m_new)
        return (sums[0] * factor, sums[1]), (stats[0] * factor, stats[1])

    def finalize(self, stats, m):
        empty = stats[1] == 0
        total, n = (jnp.where(empty, 1, x) for x in stats)
        factors = self.alpha / total, (self.alpha_ma - self.alpha) / n
        return tuple(jnp.where(empty, 0, g) for g in factors)


def affine(
    logits: Float[Array, "..."],
    *,
    alpha: float | Array = 1.0,
    alpha_ma: float | Array = 1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Affine softmax: ``α softmax(s)_j + (α_ma - α) / n``, n the number of keys. Signed; rows sum to α_ma.

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

    Source: arXiv 2602.23057, as notes on it quote it: one α per query and head, and an average of rate 0.9, from 0.

    >>> import jax.numpy as jnp
    >>> from attnorm import affine
    >>> [round(float(x), 4) for x in affine(jnp.log(jnp.array([1.0, 3.0])), alpha=2.0)]
    [0.0, 1.0]
    """
    return Affine(alpha, alpha_ma).weights(logits, axis=axis, where=where)
