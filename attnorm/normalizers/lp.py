"""L_p softmax: weights ``exp(s_j) / (Σ_k exp(p s_k))^(1/p)``, whose p-norm is 1.

p = 1 is softmax, p = 2 keeps the variance of uncorrelated values, p = ∞ is ``exp(s - max s)``.
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.rule import Normalizer, checked_parameter, is_array

# Small whole powers are cheaper, and as exact, by multiplication as by a second exponential.
_LARGEST_MULTIPLIED_POWER = 8
# Finite, so that the slope d · exp(p d) of a key with logit -inf is 0 and not inf · 0.
LOWEST_DIFFERENCE = -1e30
# Beyond, p times a difference of logits leaves float32.
_P_RANGE = (1e-6, 1e6)
LOWEST_LEARNED = 1e-5  # what rounds to less in float32 is still in the range
# A backward pass that recomputes its logits may round them otherwise than the forward pass did, so keys that are
# this many rounding errors of the maximum below it count as equal to it.
_TIE_TOLERANCE = 8


@dataclass(frozen=True)
class Lp(Normalizer):
    """The rule for finite p: f = exp(s - m), h = exp(p (s - m)), g = h^(-1/p)."""

    p: float | Array

    learned = {"p": Learned(2.0, low=LOWEST_LEARNED)}

    def __post_init__(self):
        wanted = f"a positive number from {_P_RANGE[0]:g} to {_P_RANGE[1]:g}"
        p = checked_parameter("p", self.p, wanted, lambda p: (p >= _P_RANGE[0]) & (p <= _P_RANGE[1]))
        object.__setattr__(self, "p", p)

    @property
    def needs_equal_logits(self):
        return is_array(self.p) or self.p > 2  # exp(p s) magnifies rounding errors of s by p

    def terms(self, s, m):
        difference = s - m
        f = jnp.exp(difference)
        if _is_small_whole(self.p):
            return f, (_whole_power(f, int(self.p)),)
        return f, (jnp.exp(self.p * jnp.maximum(difference, LOWEST_DIFFERENCE)),)

    def finalize(self, stats, m):
        (norm,) = stats
        visible = norm != 0
        norm = jnp.where(visible, norm, 1)
        if is_array(self.p) or self.p not in (1, 2):
            root = jnp.exp(-jnp.log(norm) / self.p)
            if is_array(self.p):  # a traced p can be checked only here
                root = jnp.where(self.p > 0, root, jnp.nan)
        else:
            root = 1 / norm if self.p == 1 else jax.lax.rsqrt(norm)
        return jnp.where(visible, root, 0)

    def log_norm(self, stats, m):
        (norm,) = stats
        visible = norm != 0
        return jnp.where(visible, m + jnp.log(jnp.where(visible, norm, 1)) / self.p, -jnp.inf)


@dataclass(frozen=True)
class LInf(Normalizer):
    """The rule for p = ∞: f = exp(s - m) with m = max s, so g = 1 and λ = m.

    Here the maximum is itself the norm. Its gradient goes to the keys that attain it, in equal parts: the
    statistic counts them, and has value 1 and slope 1 at each.
    """

    needs_equal_logits = True

    def terms(self, s, m):
        return jnp.exp(s - m), (ties(s, m),)

    def finalize(self, stats, m):
        (count,) = stats
        return jnp.where(count != 0, jnp.exp(-slope_of_extremum(count)), 0)

    def log_norm(self, stats, m):
        (count,) = stats
        return jnp.where(count != 0, m + slope_of_extremum(count), -jnp.inf)


def ties(s: Array, extremum: Array) -> Array:
    """1, with slope 1, at logits that equal the maximum or minimum of their row, else 0: a statistic."""
    tolerance = _TIE_TOLERANCE * float(jnp.finfo(s.dtype).eps) * jnp.maximum(1, jnp.abs(extremum))
    at_extremum = jnp.abs(s - extremum) <= tolerance
    finite = jnp.where(at_extremum, s, 0)
    return jnp.where(at_extremum, 1 + (finite - jax.lax.stop_gradient(finite)), 0).astype(s.dtype)


def slope_of_extremum(count: Array) -> Array:
    """0, with the derivative of the row's maximum or minimum, from the sum of :func:`ties`."""
    constant = jax.lax.stop_gradient(count)
    return (count - constant) / jnp.where(constant != 0, constant, 1)


def make_lp(p: float | Array = 2.0) -> Normalizer:
    """The rule of :func:`lp` for any p > 0; ``math.inf`` only as a Python number."""
    if isinstance(p, numbers.Real) and p == math.inf:
        return LInf()
    return Lp(p)


def lp(
    logits: Float[Array, "..."],
    *,
    p: float | Array,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    r"""L_p softmax: ``exp(s_j) / (Σ_k exp(p s_k))^(1/p)``.

    Args:
      logits: floating point, any shape.
      p: the norm that is 1. A number from 1e-6 to 1e6, or ``math.inf``, is static; an array of such finite values,
        of size 1 along ``axis``, broadcasts to the logits and receives its exact gradient. Rows whose traced p is
        not positive are NaN.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype. A row without visible keys is 0, and so are its gradients.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: p <= 0 or NaN, a shape that does not broadcast.

    Source: "Attention Normalizes the Wrong Norm", convergentthinking.sh, 2025.

    >>> import jax.numpy as jnp
    >>> from attnorm import lp
    >>> weights = lp(jnp.array([0.0, 1.0, 2.0]), p=3)
    >>> print(round(float(jnp.sum(weights**3)), 4))
    1.0
    """
    return make_lp(p).weights(logits, axis=axis, where=where)


def softmax(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Softmax, ``exp(s_j) / Σ_k exp(s_k)``: weights of L1 norm 1. Arguments and errors as in :func:`lp`.

    Unlike ``jax.nn.softmax``, a row without visible keys is 0.

    Source: arXiv 1706.03762, for attention.

    >>> import jax.numpy as jnp
    >>> from attnorm import softmax
    >>> print(softmax(jnp.zeros(4)))
    [0.25 0.25 0.25 0.25]
    """
    return Lp(1.0).weights(logits, axis=axis, where=where)


def l2(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """L2 softmax, ``exp(s_j) / sqrt(Σ_k exp(2 s_k))``. Arguments and errors as in :func:`lp`.

    For uncorrelated values of unit variance the attention output has variance 1, for every attention pattern
    and every number of keys.

    Source: "Attention Normalizes the Wrong Norm", convergentthinking.sh, 2025.

    >>> import jax.numpy as jnp
    >>> from attnorm import l2
    >>> print(l2(jnp.zeros(4)))
    [0.5 0.5 0.5 0.5]
    """
    return Lp(2.0).weights(logits, axis=axis, where=where)


def linf(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """L_∞ softmax, ``exp(s_j - max_k s_k)``: the largest weight is 1. Arguments and errors as in :func:`lp`.

    Source: none; the limit p -> inf of `lp`.

    >>> import jax.numpy as jnp
    >>> from attnorm import linf
    >>> print(linf(jnp.log(jnp.array([1.0, 2.0, 4.0]))))
    [0.25 0.5  1.  ]
    """
    return LInf().weights(logits, axis=axis, where=where)


def _is_small_whole(p) -> bool:
    return not is_array(p) and p == int(p) and p <= _LARGEST_MULTIPLIED_POWER


def _whole_power(x, exponent: int):
    if exponent == 1:
        return x
    half = _whole_power(x, exponent // 2)
    return half * half * x if exponent % 2 else half * half
