"""Powers of the logits in place of softmax, signed where odd."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.pointwise import Pointwise
from attnorm.normalizers.rule import is_array, static_field

_LARGEST_POWER = 8


@dataclass(frozen=True)
class Polynomial(Pointwise):
    """The rule of :func:`polynomial`."""

    k: int = static_field(3)

    def __post_init__(self):
        if is_array(self.k) or isinstance(self.k, bool) or self.k not in range(1, _LARGEST_POWER + 1):
            raise ValueError(f"k must be a whole number from 1 to {_LARGEST_POWER}, got {self.k!r}")
        object.__setattr__(self, "k", int(self.k))

    def weight(self, s):
        return s if self.k == 1 else jax.lax.integer_pow(s, self.k)  # GPU kernels know no first power

    def factor(self, n):
        return jax.lax.rsqrt(n)


def polynomial(
    logits: Float[Array, "..."],
    *,
    k: int = 3,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Polynomial attention: ``s_j^k / sqrt(n)``, n the number of keys that the query may see. Signed for odd k.

    Args:
      logits: floating point, any shape.
      k: a whole number from 1 to 8; float32 holds all of these at logits of 1e4.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed, and not counted.

    Returns:
      The weights, in the logits' shape and dtype. They do not sum to 1, and have no log-norm.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: another k, a shape that does not broadcast.

    Source: arXiv 2410.18613; the formula was checked against summaries of it only.

    >>> import jax.numpy as jnp
    >>> from attnorm import polynomial
    >>> print(polynomial(jnp.array([-1.0, 2.0, 0.0, 0.0])))
    [-0.5  4.   0.   0. ]
    """
    return Polynomial(k).weights(logits, axis=axis, where=where)
