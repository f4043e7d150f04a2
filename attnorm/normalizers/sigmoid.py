"""Sigmoid attention: every key is weighted by itself, and a bias keeps the sum of the weights in bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.pointwise import Pointwise
from attnorm.normalizers.rule import Normalizer, checked_parameter


@dataclass(frozen=True)
class Sigmoid(Pointwise):
    """The rule of :func:`sigmoid` for a given bias."""

    b: float | Array

    learned = {"b": Learned(0.0)}

    def __post_init__(self):
        b = checked_parameter("b", self.b, "finite", lambda b: abs(b) < math.inf)
        object.__setattr__(self, "b", b)

    def weight(self, s):
        return jax.nn.sigmoid(s + self.b)


@dataclass(frozen=True)
class SigmoidOfCount(Pointwise):
    """The rule of :func:`sigmoid` for b = -log n."""

    needs = frozenset({"map", "count"})

    def map_logits(self, s, place):
        return s - jnp.log(place.count)

    def weight(self, s):
        return jax.nn.sigmoid(s)


def make_sigmoid(b: float | Array | None = None) -> Normalizer:
    """The rule of :func:`sigmoid`."""
    return SigmoidOfCount() if b is None else Sigmoid(b)


def sigmoid(
    logits: Float[Array, "..."],
    *,
    b: float | Array | None = None,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Sigmoid attention: ``1 / (1 + exp(-s_j - b))``, by default with b = -log n.

    Args:
      logits: floating point, any shape.
      b: the bias: a number, an array of size 1 along ``axis`` that broadcasts to the logits and receives its exact
        gradient, or None for -log n, n the number of keys that the query may see. Published is the former, with
        n the length of the training sequences.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed, and not counted.

    Returns:
      The weights, in the logits' shape and dtype. They do not sum to 1, and have no log-norm.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: b infinite or NaN, a shape that does not broadcast.

    Source: arXiv 2409.04431.

    >>> import jax.numpy as jnp
    >>> from attnorm import sigmoid
    >>> print(sigmoid(jnp.zeros(3)), sigmoid(jnp.zeros(2), b=0.0))
    [0.25 0.25 0.25] [0.5 0.5]
    """
    return make_sigmoid(b).weights(logits, axis=axis, where=where)
