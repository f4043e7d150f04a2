"""Self-adjusted softmax: weights times the logit's place in the row's range."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.lp import slope_of_extremum, ties
from attnorm.normalizers.rule import Normalizer, of_weighted


@dataclass(frozen=True)
class SASoftmax(Normalizer):
    """The rule: f = s exp(s - m) and exp(s - m), with m the row's maximum and smallest logit.

    Statistics: the sum of exp(s - m), and the ties at both ends, to which the gradient of the range goes.
    """

    needs = frozenset({"numerators"})
    needs_equal_logits = True

    def start(self, floor):
        return floor, 0.0  # the range begins at 0

    def next_reference(self, m, s, axis=-1):
        largest, smallest = m
        finite = jnp.where(s == -jnp.inf, 0, s)
        smallest = jnp.minimum(smallest, jnp.min(finite, axis=axis, keepdims=True, initial=0))
        return super().next_reference(largest, s, axis), smallest

    def merged_reference(self, m, other):
        return jnp.maximum(m[0], other[0]), jnp.minimum(m[1], other[1])

    def terms(self, s, m):
        def of_finite(s):
            e = jnp.exp(s - m[0])
            return (s * e, e), (e, ties(s, m[0]), ties(s, m[1]))

        return of_weighted(of_finite, s)

    def carry(self, sums, stats, m_old, m_new):
        factor = jnp.exp(m_old[0] - m_new[0])
        stays = (jax.lax.stop_gradient(ties(old, new)) for old, new in zip(m_old, m_new, strict=True))
        factors = factor, *stays
        return tuple(x * factor for x in sums), tuple(h * r for h, r in zip(stats, factors, strict=True))

    def finalize(self, stats, m):
        total, at_high, at_low = stats
        low = jnp.minimum(m[1] + slope_of_extremum(at_low), 0)
        high = jnp.maximum(m[0] + slope_of_extremum(at_high), 0)
        scale = total * (high - low)
        one = jnp.where(scale != 0, 1 / jnp.where(scale != 0, scale, 1), 0)
        return one, -low * one


def sa_softmax(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Self-adjusted softmax: ``(s_j - min(s_min, 0)) / (max(s_max, 0) - min(s_min, 0)) softmax(s)_j``.

    Rows do not sum to 1, change with a shift of the logits, and are 0 where all logits are. Arguments and
    errors as in :func:`attnorm.lp`; no log-norm.

    Source: arXiv 2502.18277.

    >>> import jax.numpy as jnp
    >>> from attnorm import sa_softmax
    >>> [round(float(x), 4) for x in sa_softmax(jnp.log(jnp.array([1.0, 3.0])))]
    [0.0, 0.75]
    """
    return SASoftmax().weights(logits, axis=axis, where=where)
