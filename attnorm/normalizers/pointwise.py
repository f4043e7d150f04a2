"""Weights that depend on a key's own logit and on the number of keys alone; no sum of the others' logits."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array

from attnorm.normalizers.rule import Normalizer, of_weighted, undefined


class Pointwise(Normalizer):
    """The rule: f = ``weight(s)``, the statistic counts the keys, g = ``factor(n)``."""

    uses_max = False

    def weight(self, s: Array) -> Array:
        """The weight of a finite logit, but for the row's factor."""
        raise undefined(self, "weight(s), the weight of one logit")

    def factor(self, n: Array) -> Array:
        """What n >= 1 keys multiply the weights by."""
        return jnp.ones_like(n)

    def terms(self, s, m):
        return of_weighted(lambda s: (self.weight(s), (jnp.ones_like(s),)), s)

    def finalize(self, stats, m):
        (count,) = stats
        return jnp.where(count > 0, self.factor(jnp.maximum(count, 1)), 0)
