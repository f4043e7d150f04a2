"""Logits normalised to mean 0 and variance 1 over the keys, in place of softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.rule import Normalizer, checked_parameter, of_weighted


@dataclass(frozen=True)
class NAP(Normalizer):
    """The rule: f = d and 1, statistics 1, d and d², with d = s - m and m the mean so far (and its number of keys).

    Relative to a mean, even to one that is not exact, no digits are lost, however large the logits are.
    """

    gain: float | Array = 1.0
    bias: float | Array = 0.0
    eps: float | Array = 1e-5

    learned = {"gain": Learned(1.0), "bias": Learned(0.0)}
    needs = frozenset({"numerators"})

    def __post_init__(self):
        for name in ("gain", "bias"):
            value = checked_parameter(name, getattr(self, name), "finite", lambda x: abs(x) < math.inf)
            object.__setattr__(self, name, value)
        eps = checked_parameter("eps", self.eps, "positive", lambda eps: (eps > 0) & (eps < math.inf))
        object.__setattr__(self, "eps", eps)

    def start(self, floor):
        return 0.0, 0.0

    def next_reference(self, m, s, axis=-1):
        weighted = s != -jnp.inf
        more = jnp.sum(weighted, axis=axis, keepdims=True, dtype=s.dtype)
        # From the mean so far on, so that large logits do not round it.
        shift = jnp.sum(jnp.where(weighted, s - m[0], 0), axis=axis, keepdims=True)
        n = m[1] + more
        return m[0] + shift / jnp.maximum(n, 1), n

    def merged_reference(self, m, other):
        n = m[1] + other[1]
        return m[0] + (other[0] - m[0]) * (other[1] / jnp.maximum(n, 1)), n

    def terms(self, s, m):
        def of_finite(s):
            d, one = s - m[0], jnp.ones_like(s)
            return (d, one), (one, d, d * d)

        return of_weighted(of_finite, s)

    def carry(self, sums, stats, m_old, m_new):
        n, first, second = stats
        shift = m_old[0] - m_new[0]
        first, second = first + n * shift, second + shift * (2 * first + n * shift)
        return (sums[0] + shift * sums[1], sums[1]), (n, first, second)

    def finalize(self, stats, m):
        empty = stats[0] == 0
        n = jnp.where(empty, 1, stats[0])
        mean, square = stats[1] / n, stats[2] / n
        scale = self.gain * jax.lax.rsqrt(jnp.maximum(square - mean * mean, 0) + self.eps)
        return tuple(jnp.where(empty, 0, g) for g in (scale, self.bias - scale * mean))


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

    A row of one key, or of equal logits, has the weights ``bias``. Where var s is below ε, slopes are as large as
    ε^(-1/2), and magnify rounding errors.

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
