"""Squared ReLU above a threshold that grows with the number of keys, as the largest of their random logits does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.pointwise import Pointwise
from attnorm.normalizers.rule import checked_parameter


@dataclass(frozen=True)
class ThresholdRectified(Pointwise):
    """The rule of :func:`threshold_rectified`."""

    beta: float | Array = 1.0
    d: float | Array = 64.0

    learned = {"beta": Learned(1.0)}
    needs = frozenset({"map", "count"})

    def __post_init__(self):
        beta = checked_parameter("beta", self.beta, "finite", lambda beta: abs(beta) < math.inf)
        d = checked_parameter("d", self.d, "positive", lambda d: (d > 0) & (d < math.inf))
        object.__setattr__(self, "beta", beta)
        object.__setattr__(self, "d", d)

    def map_logits(self, s, place):
        # Two roots: that of log n has no slope at n = 1, and needs none.
        return s - self.beta * jnp.sqrt(2 * jnp.log(place.count)) / jnp.sqrt(self.d)

    def weight(self, s):
        return jnp.square(jax.nn.relu(s))


def threshold_rectified(
    logits: Float[Array, "..."],
    *,
    beta: float | Array = 1.0,
    d: float | Array = 64.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Threshold-rectified attention: ``max(s_j - β sqrt(2 log(n) / d), 0)²``, n the number of keys.

    Meant for cosines of queries and keys as logits (normalise both, with ``scale=1``): of n random directions in d
    dimensions, the largest cosine is near the threshold.

    Args:
      logits: floating point, any shape.
      beta: a number, or an array of size 1 along ``axis`` that broadcasts to the logits and receives its exact
        gradient.
      d: the head dim, positive; like beta a number or an array.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed, and not counted.

    Returns:
      The weights, in the logits' shape and dtype. They do not sum to 1, and have no log-norm.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: beta infinite or NaN, d not positive, a shape that does not broadcast.

    Source: arXiv 2601.12145 and github.com/snap-research/TDA, which have i + 1 for n: the same in causal
    attention, with positions i from 0.

    >>> import jax.numpy as jnp
    >>> from attnorm import threshold_rectified
    >>> print(threshold_rectified(jnp.array([0.5, -0.5]), beta=0.0))
    [0.25 0.  ]
    """
    return ThresholdRectified(beta, d).weights(logits, axis=axis, where=where)
