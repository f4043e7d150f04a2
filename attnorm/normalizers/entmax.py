"""The members of the Tsallis family by their names, with maps of their logits where they have one."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.rule import checked_parameter
from attnorm.normalizers.tsallis import Leveled, Tsallis

# 1 - 1/q must be an alpha of the family.
_Q_RANGE = (1.2, 1e3)


def make_sparsemax() -> Tsallis:
    """The rule of :func:`sparsemax`."""
    return Tsallis(2.0)


def make_entmax15() -> Tsallis:
    """The rule of :func:`entmax15`."""
    return Tsallis(1.5)


@dataclass(frozen=True)
class Stieltjes(Leveled):
    """The rule of :func:`stieltjes`: Tsallis weights of q s with α = 1 - 1/q."""

    q: float | Array = 2.0

    needs = Leveled.needs | {"map"}
    learned = {"q": Learned(2.0, low=_Q_RANGE[0], high=_Q_RANGE[1])}

    def __post_init__(self):
        low, high = _Q_RANGE
        q = checked_parameter("q", self.q, f"from {low:g} to {high:g}", lambda q: (q >= low) & (q <= high))
        object.__setattr__(self, "q", q)

    @property
    def alpha(self):
        return 1 - 1 / self.q

    def map_logits(self, s, place):
        return self.q * s


@dataclass(frozen=True)
class ASEntmax(Leveled):
    """The rule of :func:`asentmax`."""

    beta: float | Array = 1.0
    gamma: float | Array = 1.0
    delta: float | Array = 1.0

    alpha = 1.5
    needs = Leveled.needs | {"map", "count"}
    learned = {"beta": Learned(1.0, low=0.0), "gamma": Learned(1.0), "delta": Learned(1.0)}

    def __post_init__(self):
        beta = checked_parameter("beta", self.beta, "zero or positive", lambda x: (x >= 0) & (x < math.inf))
        object.__setattr__(self, "beta", beta)
        for name in ("gamma", "delta"):
            value = checked_parameter(name, getattr(self, name), "finite", lambda x: abs(x) < math.inf)
            object.__setattr__(self, name, value)

    def map_logits(self, s, place):
        return s * asentmax_factor(place.count, beta=self.beta, gamma=self.gamma, delta=self.delta)


def asentmax_factor(
    count: Array, *, beta: float | Array, gamma: float | Array, delta: float | Array = 1.0
) -> Array:
    """``δ + β log(n + 1)^γ``: what :func:`asentmax` multiplies logits by; everything broadcasts.

    For β and γ that depend on the token, multiply the queries by this and attend with ``"entmax15"``.

    >>> from attnorm.normalizers.entmax import asentmax_factor
    >>> print(asentmax_factor(jnp.array(1.0), beta=0.0, gamma=2.0))
    1.0
    """
    return delta + beta * jnp.log(count + 1.0) ** gamma


def sparsemax(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Sparsemax: the point of the simplex next to the logits, ``[s_j - τ]_+``.

    Arguments and errors as in :func:`entmax`, of which it is the case α = 2.

    Source: arXiv 1602.02068.

    >>> import jax.numpy as jnp
    >>> from attnorm import sparsemax
    >>> [round(float(x), 3) for x in sparsemax(jnp.array([1.0, 0.5, -1.0]))]
    [0.75, 0.25, 0.0]
    """
    return make_sparsemax().weights(logits, axis=axis, where=where)


def entmax15(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Entmax with α = 1.5: ``[s_j / 2 - τ]_+^2``. Arguments and errors as in :func:`entmax`.

    Source: arXiv 1905.05702.

    >>> import jax.numpy as jnp
    >>> from attnorm import entmax15
    >>> print(entmax15(jnp.array([5.0, 1.0])))
    [1. 0.]
    """
    return make_entmax15().weights(logits, axis=axis, where=where)


def entmax(
    logits: Float[Array, "..."],
    *,
    alpha: float | Array = 1.5,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Tsallis entmax: ``[(α - 1) s_j - τ]_+^(1/(α-1))``, with τ such that a row's weights sum to 1.

    Args:
      logits: floating point, any shape.
      alpha: 1 is softmax, 1.5 entmax-1.5, 2 sparsemax; above 1 many weights are exactly 0, below 1 tails are
        heavier than softmax's. A number, or an array of size 1 along ``axis`` that broadcasts to the logits and
        receives its exact gradient, also at 1; from 0.1 to 2, and rows where a traced one is not are NaN. Published
        as 1 + sigmoid of one number per head.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype. They have no log-norm. A row without visible keys is 0, and so are
      its gradients.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: alpha out of range, a shape that does not broadcast.

    Source: arXiv 1905.05702; a learned alpha: arXiv 1909.00015.

    >>> import jax.numpy as jnp
    >>> from attnorm import entmax
    >>> [round(float(x), 3) for x in entmax(jnp.array([1.0, 0.5, -1.0]), alpha=2.0)]
    [0.75, 0.25, 0.0]
    """
    return Tsallis(alpha).weights(logits, axis=axis, where=where)


def stieltjes(
    logits: Float[Array, "..."],
    *,
    q: float | Array = 2.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Stieltjes transform: ``(λ - s_j)^-q``, with λ such that a row's weights sum to 1.

    Arguments and errors as in :func:`entmax`; q is from 1.2 to 1000. Equal to :func:`entmax` of q s with
    α = 1 - 1/q.

    Source: arXiv 2604.15180; the formula comes from secondary sources.

    >>> import jax.numpy as jnp
    >>> from attnorm import stieltjes
    >>> print(stieltjes(jnp.zeros(4)))
    [0.25 0.25 0.25 0.25]
    """
    return Stieltjes(q).weights(logits, axis=axis, where=where)


def asentmax(
    logits: Float[Array, "..."],
    *,
    beta: float | Array = 1.0,
    gamma: float | Array = 1.0,
    delta: float | Array = 1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Adaptive-scalable entmax: ``entmax15((δ + β log(n + 1)^γ) s)``, n the number of keys the query may see.

    Arguments and errors as in :func:`entmax`; beta is not negative. Published with β = softplus and γ = 2 tanh of
    a linear map of the token: :func:`attnorm.normalizers.entmax.asentmax_factor`.

    Source: arXiv 2506.16640; the formula comes from secondary sources.

    >>> import jax.numpy as jnp
    >>> from attnorm import asentmax, entmax15
    >>> logits = jnp.array([0.0, 0.4, 0.6])
    >>> bool(asentmax(logits)[2] > entmax15(logits)[2])
    True
    """
    return ASEntmax(beta, gamma, delta).weights(logits, axis=axis, where=where)
