"""Rectified logits in place of softmax, divided by a power of the number of keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.pointwise import Pointwise
from attnorm.normalizers.rule import checked_parameter, static_field


@dataclass(frozen=True)
class OverCount(Pointwise):
    """The rule of :func:`relu`, :func:`squared_relu` and :func:`softplus`: F(s) / n^α."""

    alpha: float | Array = 1.0
    F: str = static_field("relu")

    def __post_init__(self):
        alpha = checked_parameter("alpha", self.alpha, "finite", lambda alpha: abs(alpha) < math.inf)
        object.__setattr__(self, "alpha", alpha)

    def weight(self, s):
        if self.F == "softplus":
            return jax.nn.softplus(s)
        rectified = jax.nn.relu(s)
        return rectified * rectified if self.F == "squared_relu" else rectified

    def factor(self, n):
        return jnp.exp(-self.alpha * jnp.log(n))


@dataclass(frozen=True)
class ReLUFormer(Pointwise):
    """The rule of :func:`reluformer`."""

    gamma: float | Array = 1.0

    learned = {"gamma": Learned(1.0, low=0.0)}

    def __post_init__(self):
        wanted = "positive"
        gamma = checked_parameter("gamma", self.gamma, wanted, lambda x: (x > 0) & (x < math.inf))
        object.__setattr__(self, "gamma", gamma)

    def weight(self, s):
        return jax.nn.relu(s)

    def factor(self, n):
        return jnp.sqrt(2 / n) / self.gamma


def make_relu(alpha: float | Array = 1.0) -> OverCount:
    """The rule of :func:`relu`."""
    return OverCount(alpha, "relu")


def make_squared_relu(alpha: float | Array = 1.0) -> OverCount:
    """The rule of :func:`squared_relu`."""
    return OverCount(alpha, "squared_relu")


def make_softplus(alpha: float | Array = 1.0) -> OverCount:
    """The rule of :func:`softplus`."""
    return OverCount(alpha, "softplus")


def relu(
    logits: Float[Array, "..."],
    *,
    alpha: float | Array = 1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """ReLU over the number of keys: ``max(s_j, 0) / n^α``, n the number of keys that the query may see.

    Args:
      logits: floating point, any shape.
      alpha: a number, or an array of size 1 along ``axis`` that broadcasts to the logits and receives its exact
        gradient; values near 1 were found best.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed, and not counted.

    Returns:
      The weights, in the logits' shape and dtype. They do not sum to 1, and have no log-norm.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: alpha infinite or NaN, a shape that does not broadcast.

    Source: arXiv 2309.08586.

    >>> import jax.numpy as jnp
    >>> from attnorm import relu
    >>> print(relu(jnp.array([-1.0, 1.0, 2.0, 0.0])))
    [0.   0.25 0.5  0.  ]
    """
    return make_relu(alpha).weights(logits, axis=axis, where=where)


def squared_relu(
    logits: Float[Array, "..."],
    *,
    alpha: float | Array = 1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Squared ReLU over the number of keys: ``max(s_j, 0)² / n^α``. Arguments and errors as in :func:`relu`.

    Source: arXiv 2309.08586.

    >>> import jax.numpy as jnp
    >>> from attnorm import squared_relu
    >>> print(squared_relu(jnp.array([-1.0, 1.0, 2.0, 0.0])))
    [0.   0.25 1.   0.  ]
    """
    return make_squared_relu(alpha).weights(logits, axis=axis, where=where)


def softplus(
    logits: Float[Array, "..."],
    *,
    alpha: float | Array = 1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Softplus over the number of keys: ``log(1 + exp(s_j)) / n^α``. Arguments and errors as in :func:`relu`.

    Source: arXiv 2309.08586.

    >>> import jax.numpy as jnp
    >>> from attnorm import softplus
    >>> [round(float(x), 4) for x in softplus(jnp.zeros(2))]
    [0.3466, 0.3466]
    """
    return make_softplus(alpha).weights(logits, axis=axis, where=where)


def reluformer(
    logits: Float[Array, "..."],
    *,
    gamma: float | Array = 1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """ReLU over the root of the number of keys: ``max(s_j, 0) / (γ sqrt(n / 2))``, γ positive.

    Arguments and errors as in :func:`relu`.

    Source: ReLUFormer, arXiv 2302.06461, eq. 6, as code that follows it quotes it; that learns one γ per head, from 1.

    >>> import jax.numpy as jnp
    >>> from attnorm import reluformer
    >>> print(reluformer(jnp.array([-1.0, 3.0])))
    [0. 3.]
    """
    return ReLUFormer(gamma).weights(logits, axis=axis, where=where)
