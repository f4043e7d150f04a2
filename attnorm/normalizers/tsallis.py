"""The Tsallis family: ``p_j = [(α-1) s_j - τ]_+^(1/(α-1))`` with τ such that the weights of a row sum to 1.

α = 1 is softmax, α = 1.5 entmax-1.5, α = 2 sparsemax; α < 1 has heavier tails than softmax.

The row's unknown is not τ but ℓ, the logarithm of the largest weight. With ``a = α - 1``, ``d_j = s_j - max s`` and
the deformed exponential ``e(x) = [1 + a x]_+^(1/a)``,

    p_j = exp(ℓ) e(d_j exp(-a ℓ))

so that nothing is lost by cancellation, neither where α is near 1 nor where many keys share the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.rule import Normalizer, Place, checked_parameter, is_array, undefined

# Beyond 2 the slope p^(2-α) has no bound; below, a row's weights are as good as equal.
ALPHA_RANGE = (0.1, 2.0)
# A logit this far below the maximum is as good as hidden; finite, so that no inf · 0 arises in a slope.
_LOWEST_DIFFERENCE = -1e15
# Below, log(1 + y) / y by its series: the slope's closed form cancels there.
_SERIES_BELOW = 0.03
_SERIES_TERMS = 12


class Sums(NamedTuple):
    """Row sums at some ℓ: of e, of its slope e^(1-a), and of the slope's own e^(1-2a) (0 where that is not used)."""

    total: Array
    slope: Array
    curvature: Array


class Search(NamedTuple):
    """What a row knows of its ℓ: the current value, bounds on both sides, and the last step, relative to 1."""

    level: Array
    low: Array
    high: Array
    step: Array


class Leveled(Normalizer):
    """Base of the rules whose weights are a map of Tsallis weights: ``spread(p_j)``, by default p_j itself.

    ``alpha`` is a number or an array; subclasses that need a map of their logits add it to ``needs``.
    """

    needs = frozenset({"rows", "level"})

    @property
    def alpha(self) -> float | Array:
        raise undefined(self, "alpha")

    def spread(self, p: Array, place: Place) -> Array:
        """The weight of a visible key from its Tsallis weight."""
        return p

    # One logit, relative to the row's maximum: d = s - m, -inf where hidden.

    def probabilities(self, d: Array, level: Array) -> Array:
        """The Tsallis weights p at the level ℓ; exact slopes in d, ℓ and alpha."""
        a = self.alpha - 1
        shrunk = jnp.exp(-a * level) if is_array(self.alpha) or a else 1.0
        e, _, _ = self._terms(d, shrunk)
        return jnp.exp(level) * e

    def has_weight(self, d: Array, level: Array) -> Array:
        """Whether p is positive, or NaN."""
        a = self.alpha - 1
        return ~(1 + a * (d * jnp.exp(-a * level)) <= 0)

    @property
    def passes(self) -> int:
        """Of 4096 normal logits, one query after the other: the maximum, and the steps that follow."""
        if is_array(self.alpha) or self.alpha != 1:
            return 5 if is_array(self.alpha) or self.alpha <= 1.5 else 8
        return 2

    @property
    def has_zeros(self) -> bool:
        """Whether a key can have weight 0: where α > 1."""
        return is_array(self.alpha) or bool(self.alpha > 1)

    def _terms(self, d, shrunk):
        """e, e^(1-a) and e^(1-2a) at ``x = d · shrunk``."""
        alpha = self.alpha
        hidden = d == -jnp.inf
        x = jnp.maximum(d, _LOWEST_DIFFERENCE) * shrunk
        if is_array(alpha) or alpha < 1:
            terms = _general_terms(x, alpha - 1)
            if is_array(alpha):  # a traced alpha can be checked only here
                accepted = (alpha >= ALPHA_RANGE[0]) & (alpha <= ALPHA_RANGE[1])
                terms = [jnp.where(accepted, term, jnp.nan) for term in terms]
            return tuple(jnp.where(hidden, 0, term) for term in terms)
        alpha = float(alpha)  # as it is, being no array
        if alpha == 1:
            e = jnp.exp(x)
            return e, e, e
        y = 1 + (alpha - 1) * x
        power = round(1 / (alpha - 1))
        if abs(power * (alpha - 1) - 1) > 1e-12 or power > 4:
            return _general_terms(x, alpha - 1)
        outside = y <= 0  # not so for NaN, which must show in the weights
        y = jnp.where(outside, 0, y)
        powers = [jnp.where(outside, 0, jnp.ones_like(y))]
        for _ in range(power):
            powers.append(powers[-1] * y if len(powers) > 1 else y)
        return powers[power], powers[power - 1], powers[power - 2] if power > 1 else jnp.zeros_like(y)

    # One row.

    def sums(self, d: Array, level: Array) -> tuple[Array, Array, Array]:
        """The terms of :class:`Sums`, not yet summed."""
        return self._terms(d, jnp.exp(-(self.alpha - 1) * level))

    def solved(self, sums_at: Callable[[Array], Sums], like: Array, num_keys: int) -> Array:
        """The level of every row, from its sums at any level; shape and dtype of ``like``."""

        def one_pass(state):
            count, search = state
            return count + 1, self.next_search(search, sums_at(search.level))

        def unsolved(state):
            count, search = state
            return (count < self._most_passes(like.dtype)) & self.is_unsolved(search)

        zeros = jnp.zeros_like(like)
        # The largest weight is between 1 / num_keys and 1.
        search = Search(zeros, zeros - jnp.log(float(max(num_keys, 1))), zeros, zeros + jnp.inf)
        return jax.lax.while_loop(unsolved, one_pass, (0, search))[1].level

    def next_search(self, search: Search, sums: Sums) -> Search:
        """One step towards ``exp(ℓ) Σ e = 1``.

        The (1/a)-norm of p is convex in τ (Minkowski), so Newton's method on the norm, not on the sum, comes from one
        side without overshooting, and in one step where all logits are equal. Halley's correction makes it cubic
        where the curvature exists, for α <= 1.5; its overshoot is caught by the bounds.
        """
        a = jnp.asarray(self.alpha - 1, search.level.dtype)
        empty = sums.total == 0
        total, slope = (jnp.where(empty, 1, x) for x in (sums.total, sums.slope))
        log_sum = search.level + jnp.log(total)
        low = jnp.where(log_sum <= 0, search.level, search.low)
        high = jnp.where(log_sum >= 0, search.level, search.high)
        excess = jnp.where(a == 0, log_sum, -jnp.expm1(-a * log_sum) / jnp.where(a == 0, 1, a))
        ratio = slope / total
        bend = (1 - a) * (sums.curvature / total - ratio**2) / ratio**2
        bend = jnp.where(self._is_smooth(a), jnp.clip(excess * bend / 2, -1.0, 0.5), 0)
        step = excess / ratio / (1 - bend)
        level = search.level + jnp.where(
            a == 0,
            -step,
            jnp.log1p(-jnp.minimum(a * step, 0.999)) / jnp.where(a == 0, 1, a),
        )
        level = jnp.where((level < low) | (level > high), (low + high) / 2, level)
        step = jnp.where(empty, 0, step)
        return Search(jnp.where(empty, search.level, level), low, high, step)

    def is_unsolved(self, search: Search) -> Array:
        """Whether some row needs another pass. Rows of NaN do not."""
        eps = float(jnp.finfo(search.step.dtype).eps)
        a = jnp.asarray(self.alpha - 1, search.step.dtype)
        # After a cubic step of that size the error is below eps; without curvature only a last small step tells,
        # and from the one side that Newton's method comes from.
        unsolved = jnp.where(self._is_smooth(a), jnp.abs(search.step) > eps**0.5 / 2, search.step > 8 * eps)
        return jnp.any(unsolved)

    def _is_smooth(self, a):
        return a <= 0.5

    def _most_passes(self, dtype) -> int:
        """Newton's method on a convex function halves the value or the slope in each pass; bounds both."""
        if not is_array(self.alpha) and self.alpha == 1:
            return 1  # the first step is exact
        return 64 if jnp.finfo(dtype).bits == 32 else 128

    # Dense weights.

    def row_weights(self, s, visible, place, axis):
        m = jnp.max(s, axis=axis, keepdims=True, initial=-jnp.inf, where=visible)
        m = jax.lax.stop_gradient(jnp.maximum(m, float(jnp.finfo(s.dtype).min)))
        d = jnp.where(visible, s - m, -jnp.inf)
        empty = ~jnp.any(visible, axis=axis, keepdims=True)

        def excess(level):
            total = jnp.sum(self.probabilities(d, level), axis=axis, keepdims=True)
            return jnp.where(empty, level, total - 1)

        def sums_at(level):
            return Sums(*(jnp.sum(term, axis=axis, keepdims=True) for term in self.sums(d, level)))

        def solve(_, start):
            return self.solved(sums_at, start, s.shape[axis])

        level = jax.lax.custom_root(
            excess, jnp.zeros_like(m), solve, lambda linear, y: y / linear(jnp.ones_like(y))
        )
        return self.spread(self.probabilities(d, level), place)


def _general_terms(x, a):
    """e, e^(1-a), e^(1-2a) for x <= 0 and any a, also 0, with exact slopes in both."""
    y = 1 + a * x
    outside = y <= 0
    x = jnp.where(outside, 0, x)
    y = jnp.where(outside, 1, y)
    log_e = x * _log1p_ratio(a * x) if is_array(a) else jnp.log1p(a * x) / a
    e = jnp.where(outside, 0, jnp.exp(log_e))
    return e, e / y, e / y**2


def _log1p_ratio(y):
    """log(1 + y) / y."""
    small = jnp.abs(y) < _SERIES_BELOW
    near, far = jnp.where(small, y, 0), jnp.where(small, 1, y)
    series = jnp.zeros_like(near)
    for k in reversed(range(_SERIES_TERMS)):
        series = series * -near + 1 / (k + 1)
    return jnp.where(small, series, jnp.log1p(far) / far)


@dataclass(frozen=True)
class Tsallis(Leveled):
    """The rule of :func:`attnorm.entmax`."""

    alpha: float | Array = 1.5

    learned = {"alpha": Learned(1.5, low=1.0, high=2.0)}

    def __post_init__(self):
        object.__setattr__(self, "alpha", checked_alpha(self.alpha))


def checked_alpha(alpha: float | Array) -> float | Array:
    low, high = ALPHA_RANGE
    return checked_parameter("alpha", alpha, f"from {low:g} to {high:g}", lambda a: (a >= low) & (a <= high))
