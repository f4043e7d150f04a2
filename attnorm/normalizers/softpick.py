"""Softpick: a rectified softmax, without attention sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.rule import Normalizer, checked_parameter, of_weighted


@dataclass(frozen=True)
class Softpick(Normalizer):
    """The rule: f = relu(e^s - 1) e^-m, h = \\|e^s - 1\\| e^-m, g = 1 / (h + ε e^-m), with m >= 0."""

    eps: float | Array = 1e-8

    def __post_init__(self):
        eps = checked_parameter("eps", self.eps, "zero or positive", lambda e: (e >= 0) & (e < math.inf))
        object.__setattr__(self, "eps", eps)

    def start(self, floor):
        return 0.0  # the logit of the 1 that is subtracted

    def terms(self, s, m):
        def of_finite(s):
            # No difference of two exponentials: near s = 0 it would leave few digits. With t = tanh(|s| / 2),
            # 1 - exp(-|s|) = 2 t / (1 + t), which compilers for kernels know, as they do not know expm1.
            t = jnp.tanh(jnp.abs(s) / 2)
            size = 2 * t / (1 + t) * jnp.exp(jnp.maximum(s, 0) - m)
            return jnp.where(s <= 0, 0, size), (size,)  # NaN stays

        return of_weighted(of_finite, s)

    def rescale(self, m_old, m_new):
        factor = jnp.exp(m_old - m_new)
        return factor, (factor,)

    def finalize(self, stats, m):
        (size,) = stats
        total = size + self.eps * jnp.exp(-m)
        return jnp.where(size != 0, 1 / jnp.where(size != 0, total, 1), 0)


def softpick(
    logits: Float[Array, "..."],
    *,
    eps: float | Array = 1e-8,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Softpick: ``max(exp(s_j) - 1, 0) / (Σ_k |exp(s_k) - 1| + ε)``.

    Args:
      logits: floating point, any shape.
      eps: zero or positive: a number, or an array of size 1 along ``axis`` that broadcasts to the logits and receives
        its exact gradient. The published code adds it after division by the largest exponential, where it depends on
        the largest logit; here it is the ε of the formula.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype; they sum to at most 1, and to 0 where no logit is positive. They
      have no log-norm.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: eps negative, infinite or NaN, a shape that does not broadcast.

    Source: arXiv 2504.20966 and its code.

    >>> import jax.numpy as jnp
    >>> from attnorm import softpick
    >>> [round(float(x), 4) for x in softpick(jnp.log(jnp.array([2.0, 4.0, 0.5, 0.5])))]
    [0.2, 0.6, 0.0, 0.0]
    """
    return Softpick(eps).weights(logits, axis=axis, where=where)
