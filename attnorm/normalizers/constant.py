"""Softmax with a constant in the denominator: a key that takes weight and gives no value."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.rule import Normalizer, checked_parameter, is_array, undefined


class _WithConstant(Normalizer):
    """The rule: f = h = exp(s - m), g = 1 / (h + exp(c - m)), with c the logit of the constant."""

    def _constant(self) -> Array | float:
        raise undefined(self, "_constant()")

    def terms(self, s, m):
        f = jnp.exp(s - m)
        return f, (f,)

    def start(self, floor):
        # From the constant's own logit on, else exp(c - m) overflows in rows of very negative logits.
        return jnp.maximum(jax.lax.stop_gradient(self._constant()), floor)

    def finalize(self, stats, m):
        total = self._total(stats, m)
        return jnp.where(total != 0, 1 / jnp.where(total != 0, total, 1), 0)

    def log_norm(self, stats, m):
        total = self._total(stats, m)
        return jnp.where(total != 0, m + jnp.log(jnp.where(total != 0, total, 1)), -jnp.inf)

    def _total(self, stats, m):
        (norm,) = stats
        return norm + jnp.exp(self._constant() - m)


@dataclass(frozen=True)
class Sink(_WithConstant):
    """The rule of :func:`sink`."""

    b: float | Array = 0.0

    learned = {"b": Learned(0.0)}

    def __post_init__(self):
        b = checked_parameter("b", self.b, "a number below infinity", lambda b: b < math.inf)
        object.__setattr__(self, "b", b)

    def _constant(self):
        return self.b


@dataclass(frozen=True)
class SoftmaxPlusN(_WithConstant):
    """The rule of :func:`softmax_plus_n`."""

    n: float | Array = 1.0

    learned = {"n": Learned(1.0, low=0.0)}

    def __post_init__(self):
        # Zero is softmax, but only as a number: log n has no slope there.
        if is_array(self.n):
            n = checked_parameter("n", self.n, "positive", lambda n: (n > 0) & (n < math.inf))
        else:
            n = checked_parameter("n", self.n, "zero or positive", lambda n: 0 <= n < math.inf)
        object.__setattr__(self, "n", n)

    def _constant(self):
        if is_array(self.n):
            return jnp.log(self.n)
        return math.log(self.n) if self.n else -math.inf


def sink(
    logits: Float[Array, "..."],
    *,
    b: float | Array = 0.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Softmax with an attention sink of logit b: ``exp(s_j) / (exp(b) + Σ_k exp(s_k))``.

    Args:
      logits: floating point, any shape.
      b: the sink's logit: a number, or an array of size 1 along ``axis`` that broadcasts to the logits and receives
        its exact gradient. ``-inf`` gives softmax.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype; they sum to less than 1.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: b = inf or NaN, a shape that does not broadcast.

    Source: the attention of gpt-oss (OpenAI, 2025), one learned b per head.

    >>> import jax.numpy as jnp
    >>> from attnorm import sink
    >>> print(sink(jnp.zeros(3)))
    [0.25 0.25 0.25]
    """
    return Sink(b).weights(logits, axis=axis, where=where)


def softmax_plus_n(
    logits: Float[Array, "..."],
    *,
    n: float | Array = 1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Softmax with n added to the denominator: ``exp(s_j) / (n + Σ_k exp(s_k))``.

    n = 1 is "attention is off by one": a head may attend to nothing. n = 0 is softmax. Arguments and errors
    as in :func:`sink`; n is positive, or the number 0.

    Source: "Attention Is Off By One", evanmiller.org, 2023.

    >>> import jax.numpy as jnp
    >>> from attnorm import softmax_plus_n
    >>> print(softmax_plus_n(jnp.zeros(3)))
    [0.25 0.25 0.25]
    """
    return SoftmaxPlusN(n).weights(logits, axis=axis, where=where)
