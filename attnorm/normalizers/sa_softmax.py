"""Self-adjusted softmax: weights times the logit's place in the row's range."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.lp import Lp
from attnorm.normalizers.rule import Normalizer, Place, evaluate


@dataclass(frozen=True, eq=False)
class SASoftmax(Normalizer):
    """:func:`sa_softmax` needs the row's smallest logit too, which no running maximum brings."""

    needs = frozenset({"rows"})

    def row_weights(self, s, visible, place, axis):
        weights, _ = evaluate(Lp(1.0), s, visible, Place(), axis)
        # Hidden logits are 0 here, and 0 belongs to the range.
        low = jnp.minimum(jnp.min(s, axis, keepdims=True, initial=0), 0)
        high = jnp.maximum(jnp.max(s, axis, keepdims=True, initial=0), 0)
        size = high - low
        return jnp.where(size > 0, (s - low) / jnp.where(size > 0, size, 1), 0) * weights


def sa_softmax(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Self-adjusted softmax: ``(s_j - min(s_min, 0)) / (max(s_max, 0) - min(s_min, 0)) softmax(s)_j``.

    Dense only. Rows do not sum to 1, change with a shift of the logits, and are 0 where all logits are. Arguments and
    errors as in :func:`attnorm.lp`; no log-norm.

    Source: arXiv 2502.18277.

    >>> import jax.numpy as jnp
    >>> from attnorm import sa_softmax
    >>> [round(float(x), 4) for x in sa_softmax(jnp.log(jnp.array([1.0, 3.0])))]
    [0.0, 0.75]
    """
    return SASoftmax().weights(logits, axis=axis, where=where)
