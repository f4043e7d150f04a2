"""What a rule says about a parameter that can be learned: where it starts, and the range that it must not leave."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
from jaxtyping import Array


@dataclass(frozen=True)
class Learned:
    """A parameter of value ``init``, between ``low`` and ``high``, as a function of an unbounded number.

    Identity without bounds, softplus with one, the logistic function with two.

    >>> from attnorm.normalizers.learned import Learned
    >>> p = Learned(2.0, low=0.0)
    >>> print(p.value(p.start()))
    2.0
    """

    init: float
    low: float = -math.inf
    high: float = math.inf

    def __post_init__(self):
        if not self.low < self.init < self.high:
            raise ValueError(
                f"a learned parameter must start between {self.low:g} and {self.high:g}, got {self.init!r}"
            )

    def value(self, x: Array) -> Array:
        """The parameter at the unbounded number x."""
        if self.low == -math.inf and self.high == math.inf:
            return x
        if self.high == math.inf:
            return self.low + jax.nn.softplus(x)
        if self.low == -math.inf:
            return self.high - jax.nn.softplus(-x)
        return self.low + (self.high - self.low) * jax.nn.sigmoid(x)

    def start(self) -> float:
        """The number at which the parameter is ``init``."""
        if self.low == -math.inf and self.high == math.inf:
            return self.init
        if self.high == math.inf:
            return _inverse_softplus(self.init - self.low)
        if self.low == -math.inf:
            return -_inverse_softplus(self.high - self.init)
        return math.log((self.init - self.low) / (self.high - self.init))


def _inverse_softplus(y):
    return y + math.log(-math.expm1(-y))
