"""Softmax weights that are set to 0 below a threshold."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.rule import checked_parameter
from attnorm.normalizers.tsallis import Leveled


@dataclass(frozen=True)
class Elastic(Leveled):
    """The rule of :func:`elastic`: a map of softmax weights, which must be known first."""

    tau: float | Array = -1.0

    alpha = 1.0
    needs = Leveled.needs | {"count"}
    learned = {"tau": Learned(-1.0, high=0.0)}

    def __post_init__(self):
        wanted = "zero or negative, and finite"
        tau = checked_parameter("tau", self.tau, wanted, lambda tau: (tau <= 0) & (tau > -math.inf))
        object.__setattr__(self, "tau", tau)

    def spread(self, p, place):
        return jax.nn.relu(p + self.tau / place.count)


def elastic(
    logits: Float[Array, "..."],
    *,
    tau: float | Array = -1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Elastic softmax: ``relu(softmax(s)_j + τ/n)``, n the number of keys that the query may see.

    Keys with less than -τ times the mean weight get none; what they lose is not given to others.

    Args:
      logits: floating point, any shape.
      tau: zero (softmax) or negative: a number, or an array of size 1 along ``axis`` that broadcasts to the logits
        and receives its exact gradient.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype. They have no log-norm.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: a positive, infinite or NaN tau, a shape that does not broadcast.

    Source: arXiv 2601.00919, as code that follows it (github.com/Fzkuji/flash-lazy-attention) has it, one τ
    per head, from -1.

    >>> import jax.numpy as jnp
    >>> from attnorm import elastic
    >>> print(elastic(jnp.zeros(4), tau=-0.5))
    [0.125 0.125 0.125 0.125]
    """
    return Elastic(tau).weights(logits, axis=axis, where=where)
