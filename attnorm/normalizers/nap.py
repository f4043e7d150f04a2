"""Logits normalised to mean 0 and variance 1 over the keys, in place of softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.rule import Normalizer, checked_parameter


@dataclass(frozen=True, eq=False)
class NAP(Normalizer):
    """:func:`nap` subtracts the mean, which one pass could do only with few digits left at large logits."""

    gain: float | Array = 1.0
    bias: float | Array = 0.0
    eps: float | Array = 1e-5

    needs = frozenset({"rows"})
    passes = 2

    def __post_init__(self):
        for name in ("gain", "bias"):
            value = checked_parameter(name, getattr(self, name), "finite", lambda x: abs(x) < math.inf)
            object.__setattr__(self, name, value)
        eps = checked_parameter("eps", self.eps, "positive", lambda eps: (eps > 0) & (eps < math.inf))
        object.__setattr__(self, "eps", eps)

    def row_weights(self, s, visible, place, axis):
        def mean(x):
            return jnp.sum(jnp.where(visible, x, 0), axis, keepdims=True) / n

        n = jnp.maximum(jnp.sum(visible, axis, keepdims=True), 1)
        centred = s - mean(s)
        return self.gain * centred * jax.lax.rsqrt(mean(centred * centred) + self.eps) + self.bias


def nap(
    logits: Float[Array, "..."],
    *,
    gain: float | Array = 1.0,
    bias: float | Array = 0.0,
    eps: float | Array = 1e-5,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Normalised attention: ``gain (s_j - mean s) / sqrt(var s + ε) + bias``, over the keys of a row. Signed.

    Dense only. A row of one key, or of equal logits, has the weights ``bias``.

    Args:
      logits: floating point, any shape.
      gain, bias, eps: numbers, or arrays of size 1 along ``axis`` that broadcast to the logits and receive their
        exact gradient; eps is positive.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype. They have no log-norm.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: a parameter infinite or NaN, or eps not positive; a shape that does not broadcast.

    Source: arXiv 2005.09561; its initial values and ε could not be checked.

    >>> import jax.numpy as jnp
    >>> from attnorm import nap
    >>> [round(float(x), 4) for x in nap(jnp.array([1.0, 3.0]))]
    [-1.0, 1.0]
    """
    return NAP(gain, bias, eps).weights(logits, axis=axis, where=where)
