"""Softmax of logits that are scaled or shifted by where they stand: by the number of keys, position or distance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.lp import Lp
from attnorm.normalizers.rule import Normalizer, checked_parameter

_SOFTMAX = Lp(1.0)


class MappedSoftmax(Normalizer):
    """The rule of softmax, for mapped logits: weights = exp(mapped s - λ)."""

    needs = frozenset({"map"})

    def terms(self, s, m):
        return _SOFTMAX.terms(s, m)

    def finalize(self, stats, m):
        return _SOFTMAX.finalize(stats, m)

    def log_norm(self, stats, m):
        return _SOFTMAX.log_norm(stats, m)


def _check(rule, name, wanted, accept):
    object.__setattr__(rule, name, checked_parameter(name, getattr(rule, name), wanted, accept))


def _is_finite(x):
    return abs(x) < math.inf


@dataclass(frozen=True)
class SSMax(MappedSoftmax):
    """The rule of :func:`ssmax`."""

    h: float | Array = 0.168
    c: float | Array = 0.0

    needs = frozenset({"map", "count"})
    learned = {"h": Learned(0.168), "c": Learned(0.0)}

    def __post_init__(self):
        _check(self, "h", "finite", _is_finite)
        _check(self, "c", "finite", _is_finite)

    def map_logits(self, s, place):
        return s * (self.h * jnp.log(place.count) + self.c)


@dataclass(frozen=True)
class LogN(MappedSoftmax):
    """The rule of :func:`log_n`."""

    n_train: float | Array = 1024.0
    floor: float | Array = 0.0

    needs = frozenset({"map", "count"})

    def __post_init__(self):
        _check(self, "n_train", "at least 2", lambda n: (n >= 2) & (n < math.inf))
        _check(self, "floor", "zero or positive", lambda x: (x >= 0) & (x < math.inf))

    def map_logits(self, s, place):
        return s * jnp.maximum(jnp.log(place.count) / jnp.log(self.n_train), self.floor)


@dataclass(frozen=True)
class SqrtLogN(MappedSoftmax):
    """The rule of :func:`sqrt_log_n`."""

    needs = frozenset({"map", "count"})

    def map_logits(self, s, place):
        return s * jnp.sqrt(2 * jnp.log(place.count))


@dataclass(frozen=True)
class Critical(MappedSoftmax):
    """The rule of :func:`critical`."""

    gamma: float | Array = 1.0

    learned = {"gamma": Learned(1.0)}
    needs = frozenset({"map", "count"})

    def __post_init__(self):
        _check(self, "gamma", "finite", _is_finite)

    def map_logits(self, s, place):
        return s * (self.gamma * jnp.log(place.count))


@dataclass(frozen=True)
class YaRN(MappedSoftmax):
    """The rule of :func:`yarn`."""

    r: float | Array = 1.0

    def __post_init__(self):
        _check(self, "r", "at least 1", lambda r: (r >= 1) & (r < math.inf))

    def map_logits(self, s, place):
        return s * jnp.square(0.1 * jnp.log(self.r) + 1)


@dataclass(frozen=True)
class Llama4(MappedSoftmax):
    """The rule of :func:`llama4`."""

    attn_scale: float | Array = 0.1
    floor_scale: float | Array = 8192.0

    needs = frozenset({"map", "position"})

    def __post_init__(self):
        _check(self, "attn_scale", "finite", _is_finite)
        _check(self, "floor_scale", "at least 1", lambda x: (x >= 1) & (x < math.inf))

    def map_logits(self, s, place):
        steps = jnp.floor((jnp.maximum(place.position, 0) + 1) / self.floor_scale)
        return s * (1 + self.attn_scale * jnp.log(steps + 1))


@dataclass(frozen=True)
class ScaleInvariant(MappedSoftmax):
    """The rule of :func:`scale_invariant`."""

    tau: float | Array = 10.0

    needs = frozenset({"map", "distance"})

    def __post_init__(self):
        _check(self, "tau", "positive", lambda tau: (tau > 0) & (tau < math.inf))

    def map_logits(self, s, place):
        growth = 2 * jnp.log1p(jnp.abs(place.distance) / self.tau)
        return jnp.sqrt(growth + 1) * s - growth


@dataclass(frozen=True)
class ALiBi(MappedSoftmax):
    """The rule of :func:`alibi`."""

    slope: float | Array = 0.5

    learned = {"slope": Learned(0.5, low=0.0)}
    needs = frozenset({"map", "distance"})

    def __post_init__(self):
        _check(self, "slope", "finite", _is_finite)

    def map_logits(self, s, place):
        return s - self.slope * jnp.abs(place.distance)


def ssmax(
    logits: Float[Array, "..."],
    *,
    h: float | Array = 0.168,
    c: float | Array = 0.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Scalable softmax: ``softmax((h log n + c) s)``, n the number of keys that the query may see.

    Args:
      logits: floating point, any shape.
      h, c: numbers, or arrays of size 1 along ``axis`` that broadcast to the logits and receive their exact gradient;
        published with one h per head, learned from 0.168, and c = 0. h = 0, c = 1 gives softmax.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed, and not counted.

    Returns:
      The weights, in the logits' shape and dtype. In attention, the log-norm is that of the scaled logits.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: h or c infinite or NaN, a shape that does not broadcast.

    Source: arXiv 2501.19399; the initial value, 1 over the mean of log n for n from 1 to 1024, could not be checked
    against its text, and some code that follows it starts from 0.43.

    >>> import jax.numpy as jnp
    >>> from attnorm import ssmax
    >>> print(ssmax(jnp.log(jnp.array([1.0, 1.0, 2.0, 4.0])), h=1 / jnp.log(4.0)))
    [0.125 0.125 0.25  0.5  ]
    """
    return SSMax(h, c).weights(logits, axis=axis, where=where)


def log_n(
    logits: Float[Array, "..."],
    *,
    n_train: float | Array = 1024.0,
    floor: float | Array = 0.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Logits scaled by the logarithm of the length: ``softmax(s max(floor, log n / log n_train))``.

    n is the number of keys that the query may see, n_train >= 2 the length at which this is softmax; floor = 1 leaves
    shorter rows as they are. Other arguments, returns and errors as in :func:`ssmax`.

    Source: arXiv 2202.12172; the floor could not be checked against a source.

    >>> import jax.numpy as jnp
    >>> from attnorm import log_n
    >>> print(log_n(jnp.log(jnp.array([1.0, 1.0, 1.0, 2.0])), n_train=2))
    [0.14285715 0.14285715 0.14285715 0.5714286 ]
    """
    return LogN(n_train, floor).weights(logits, axis=axis, where=where)


def sqrt_log_n(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Logits scaled by the maximum of as many normal numbers: ``softmax(s sqrt(2 log n))``.

    n is the number of keys that the query may see. Other arguments, returns and errors as in :func:`ssmax`.

    Source: the asymptotic maximum of n standard normal numbers; no publication of this scale could be checked.

    >>> import jax.numpy as jnp
    >>> from attnorm import sqrt_log_n
    >>> [round(float(x), 4) for x in sqrt_log_n(jnp.array([0.0, 1.0]))]
    [0.2355, 0.7645]
    """
    return SqrtLogN().weights(logits, axis=axis, where=where)


def critical(
    logits: Float[Array, "..."],
    *,
    gamma: float | Array = 1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Logits scaled by the logarithm of the length: ``softmax(γ log(n) s)``.

    n is the number of keys that the query may see. Attention changes from uniform to one-hot around
    γ = 1 / (1 - ρ), ρ the correlation of the tokens. Other arguments, returns and errors as in :func:`ssmax`.

    Source: arXiv 2510.05554; the formula was checked against summaries of it only.

    >>> import jax.numpy as jnp
    >>> from attnorm import critical
    >>> print(critical(jnp.array([0.0, 1.0])))
    [0.33333334 0.6666667 ]
    """
    return Critical(gamma).weights(logits, axis=axis, where=where)


def yarn(
    logits: Float[Array, "..."],
    *,
    r: float | Array = 1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """YaRN's temperature: ``softmax((0.1 log(r) + 1)² s)``, r >= 1 the factor by which the context is extended.

    Other arguments, returns and errors as in :func:`ssmax`. YaRN also changes the rotary embedding; this is only its
    factor of the logits, which its code puts on queries and keys, 0.1 log(r) + 1 each.

    Source: arXiv 2309.00071 and its code.

    >>> import jax.numpy as jnp
    >>> from attnorm import softmax, yarn
    >>> logits = jnp.array([0.0, 1.0])
    >>> print(bool(jnp.allclose(yarn(logits, r=jnp.exp(10.0)), softmax(4 * logits))))
    True
    """
    return YaRN(r).weights(logits, axis=axis, where=where)


def llama4(
    logits: Float[Array, "..."],
    *,
    attn_scale: float | Array = 0.1,
    floor_scale: float | Array = 8192.0,
    position: Float[Array, "..."] | None = None,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Llama 4's temperature: ``softmax((1 + attn_scale log(floor((t + 1) / floor_scale) + 1)) s)``.

    t is the position of the query: ``position``, which broadcasts to the logits with size 1 along ``axis``, by default
    that of the last key; attention knows it. Other arguments, returns and errors as in :func:`ssmax`.

    Source: the code and config published with Llama 4, for its layers without rotary embedding.

    >>> import jax.numpy as jnp
    >>> from attnorm import llama4, softmax
    >>> logits = jnp.array([0.0, 1.0])
    >>> print(bool(jnp.array_equal(llama4(logits, position=8000), softmax(logits))))
    True
    """
    return Llama4(attn_scale, floor_scale).weights(logits, axis=axis, where=where, position=position)


def scale_invariant(
    logits: Float[Array, "..."],
    *,
    tau: float | Array = 10.0,
    position: Float[Array, "..."] | None = None,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Scale-invariant attention: ``softmax(sqrt(u + 1) s - u)``, ``u = 2 log(1 + Δ / τ)``, Δ the distance.

    Δ = \\|i - j\\| between the query (``position`` as in :func:`llama4`) and the keys, which stand at 0, 1, ... along
    ``axis``. Other arguments, returns and errors as in :func:`ssmax`.

    Source: arXiv 2505.17083, from notes on it: of the factors and shifts that meet its two conditions, the ones that
    leave a key at distance 0 as it is.

    >>> import jax.numpy as jnp
    >>> from attnorm import scale_invariant
    >>> print(scale_invariant(jnp.zeros(2), tau=1.0))
    [0.2 0.8]
    """
    return ScaleInvariant(tau).weights(logits, axis=axis, where=where, position=position)


def alibi(
    logits: Float[Array, "..."],
    *,
    slope: float | Array = 0.5,
    position: Float[Array, "..."] | None = None,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Attention with linear biases: ``softmax(s - slope Δ)``, Δ the distance as in :func:`scale_invariant`.

    Published with slope 2^(-8 h / N) for head h = 1 ... N. Other arguments, returns and errors as in :func:`ssmax`.

    Source: arXiv 2108.12409; the slopes as in its code.

    >>> import jax.numpy as jnp
    >>> from attnorm import alibi
    >>> print(alibi(jnp.zeros(2), slope=jnp.log(4.0)))
    [0.2 0.8]
    """
    return ALiBi(slope).weights(logits, axis=axis, where=where, position=position)
