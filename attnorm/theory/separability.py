"""How many of the selected keys can be told apart from the others by their distance to the selected sum.

One row, with weights ``α``, vectors ``x_i``, a selection I of N keys and ``s = Σ_(j in I) α_j x_j``. A
selected key is separated if it lies within the ball around s that holds no key from outside:

    D_i = ‖α_i x_i - s‖,    r = min_(i not in I) D_i,    N_s = #{i in I : D_i < r}

The bounds are about x that are drawn independently and uniformly from a sphere of radius M, and about given
weights. They hold for weights of any normaliser. Use ``jax.vmap`` for more rows.

Sources: Section 4 of "Limitations of Normalization in Attention", arXiv 2508.17821 (N_s and Theorem 2, whose
displayed form is restored here from descriptions); arXiv 2602.01893 (precision and recall). What is named
``proved_*`` is ours.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.theory._checks import check, check_positive


class Retrieval(NamedTuple):
    """How well the ball around the selected sum retrieves the selected keys; each from 0 to 1."""

    precision: Float[Array, ""]
    recall: Float[Array, ""]
    f: Float[Array, ""]


def separable_fraction(
    weights: Float[Array, "S"], x: Float[Array, "S D"], selected: Bool[Array, "S"]
) -> Float[Array, ""]:
    """``N_s / N``: the fraction of the selected keys that are nearer to s than every other key.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import separable_fraction
    >>> weights, x = jnp.array([0.4, 0.4, 0.1, 0.1]), jnp.array([[1.0], [1.0], [1.0], [-1.0]])
    >>> float(separable_fraction(weights, x, jnp.array([True, True, False, False])))
    1.0
    """
    return retrieval(weights, x, selected).recall


def retrieval(weights: Float[Array, "S"], x: Float[Array, "S D"], selected: Bool[Array, "S"]) -> Retrieval:
    """Precision, recall and their harmonic mean F; with the values as x, those of the value space.

    Recall is ``#{i in I : D_i < ρ_min} / N``, ρ_min the nearest D from outside. Precision is
    ``N / (N + #{j not in I : D_j <= ρ_max})``, ρ_max the farthest D from inside.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import retrieval
    >>> weights, x = jnp.array([0.4, 0.4, 0.1, 0.1]), jnp.array([[1.0], [-1.0], [0.5], [-1.0]])
    >>> print(*(round(float(value), 3) for value in retrieval(weights, x, jnp.arange(4) < 2)))
    0.5 0.0 0.0
    """
    y = weights[:, None] * x
    s = jnp.sum(jnp.where(selected[:, None], y, 0), axis=0)
    return retrieval_of_distances(jnp.linalg.norm(y - s, axis=-1), selected)


def retrieval_of_distances(distances: Float[Array, "S"], selected: Bool[Array, "S"]) -> Retrieval:
    """:func:`retrieval` from the distances D of all keys to s.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import retrieval_of_distances
    >>> selected = jnp.array([True, True, False, False])
    >>> distances = jnp.array([1.0, 3.0, 2.0, 4.0])
    >>> print(*(round(float(x), 3) for x in retrieval_of_distances(distances, selected)))
    0.667 0.5 0.571
    """
    N = jnp.sum(selected)
    nearest_outside = jnp.min(jnp.where(selected, jnp.inf, distances))
    farthest_inside = jnp.max(jnp.where(selected, distances, -jnp.inf))
    recall = jnp.sum(selected & (distances < nearest_outside)) / N
    precision = N / (N + jnp.sum(~selected & (distances <= farthest_inside)))
    return Retrieval(precision, recall, 2 * precision * recall / (precision + recall))


def proved_distance_ceiling(
    weights: Float[Array, "N"], *, radius: float | Array, min_distance: float | Array = 0.0
) -> Float[Array, "N"]:
    """ξ: what ``D_i`` of each selected key cannot exceed, for vectors of norm M that are at least δ apart.

    ``ξ_i² = M² Σ_(j≠i) α_j² + (M² - δ²/2) Σ_(j≠k; j,k≠i) α_j α_k``, the cross sum over ordered pairs, because
    ``<x_j, x_k> = M² - ‖x_j - x_k‖²/2``. It holds for every placement, not only in the mean.

    Args:
      weights: those of the N selected keys, not negative.
      radius: M.
      min_distance: δ, the smallest distance between two vectors.

    Raises:
      ValueError: radius not positive, min_distance negative.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import proved_distance_ceiling
    >>> print(proved_distance_ceiling(jnp.full(3, 0.5), radius=1.0))  # all three at the same point
    [1. 1. 1.]
    """
    _check_sphere(radius, min_distance)
    squares = _sum_of_others(weights**2)
    pairs = jnp.maximum(_sum_of_others(weights) ** 2 - squares, 0)
    return jnp.sqrt(jnp.maximum(radius**2 * squares + (radius**2 - min_distance**2 / 2) * pairs, 0))


def paper_separability_bounds(
    weights: Float[Array, "N"], *, radius: float, min_distance: float, threshold: float
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Theorem 2 in the paper's form: ``1 - Σ ξ_i/(r N) <= E N_s/N <= (1/N) Σ exp(-(ξ_i - r)² / (2 M²))``.

    The lower bound holds, also for every single draw, and is often negative. The upper one is **false** as a
    bound for a ball of radius r: ξ bounds D from above where a concentration inequality needs the mean from
    below, and ξ < r must give 1 and not less. Two equal weights 1/2 always lie in the ball of radius 1
    (``D_i = ξ_i = 1/2``), so N_s/N = 1 > exp(-1/8).

    Args:
      weights: those of the N selected keys, not negative.
      radius: M.
      min_distance: δ.
      threshold: r.

    Raises:
      ValueError: radius or threshold not positive, min_distance negative.

    Source: arXiv 2508.17821, Theorem 2, restored; see the head of this module.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import paper_separability_bounds
    >>> low, high = paper_separability_bounds(jnp.full(2, 0.5), radius=1.0, min_distance=0.0, threshold=1.0)
    >>> print(f"{low:.3f} {high:.3f}")
    0.500 0.882
    """
    check_positive("threshold", threshold)
    ceiling = proved_distance_ceiling(weights, radius=radius, min_distance=min_distance)
    upper = jnp.mean(jnp.exp(-((ceiling - threshold) ** 2) / (2 * radius**2)))
    return 1 - jnp.mean(ceiling) / threshold, upper


def proved_mean_distance_floor(
    weights: Float[Array, "N"], *, radius: float | Array, num_dims: int
) -> Float[Array, "N"]:
    """A lower bound on ``E D_i``: ``M sqrt(Σ_(j≠i) α_j²) / sqrt(1 + 2/d)``, for independent x on a sphere.

    Proof. Hölder gives ``E D >= (E D²)^(3/2) / (E D⁴)^(1/2)``. With ``v = Σ_(j≠i) α_j²``: ``E D² = M² v``,
    and ``E D⁴ = M⁴ (v² + (2/d) Σ_(j≠k) α_j² α_k²) <= M⁴ v² (1 + 2/d)``, since ``E <x_j, x_k>² = M⁴/d``.

    Raises:
      ValueError: radius not positive, num_dims < 1.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import proved_mean_distance_floor
    >>> print(proved_mean_distance_floor(jnp.full(3, 0.5), radius=1.0, num_dims=2))
    [0.5 0.5 0.5]
    """
    check_positive("radius", radius)
    check("num_dims", num_dims, "at least 1", lambda d: d >= 1)
    return radius * jnp.sqrt(_sum_of_others(weights**2) / (1 + 2 / num_dims))


def proved_separability_upper_bound(
    weights: Float[Array, "N"],
    mean_distances: Float[Array, "N"],
    *,
    radius: float | Array,
    threshold: float | Array,
    exceeding: float = 0.0,
    independent: bool = True,
) -> Float[Array, ""]:
    """``E N_s/N <= (1/N) Σ min(1, exp(-2 (μ_i - t)_+² / R_i²)) + P(r > t)``, true for every threshold t.

    Proof. If ``r <= t``, a separated key has ``D_i < t``. D_i lies in [0, R_i], ``R_i = M (ᾱ - α_i)``, so
    Hoeffding's inequality bounds ``P(D_i < t)`` by the exponential. Independent x_j move D_i by at most
    ``2 M α_j`` each, so McDiarmid's inequality gives ``exp(-(μ_i - t)_+² / (2 M² Σ_(j≠i) α_j²))`` too, and
    the smaller counts.

    Args:
      weights: those of the N selected keys, not negative.
      mean_distances: ``μ_i <= E D_i``, as :func:`proved_mean_distance_floor`.
      radius: M, no x is longer.
      threshold: t, a fixed number. The r of a draw must not be put here: it depends on the draw.
      exceeding: ``P(r > t)``, the probability that no outside key comes within t of s; 0 for a fixed ball
        ``r = t``.
      independent: whether the x are independent of each other.

    Raises:
      ValueError: radius not positive, threshold negative, exceeding not from 0 to 1.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import proved_mean_distance_floor, proved_separability_upper_bound
    >>> weights = jnp.full(100, 0.1)
    >>> mean = proved_mean_distance_floor(weights, radius=1.0, num_dims=64)
    >>> print(round(float(proved_separability_upper_bound(weights, mean, radius=1.0, threshold=0.1)), 3))
    0.676
    """
    check_positive("radius", radius)
    check("threshold", threshold, "at least 0", lambda t: t >= 0)
    check("exceeding", exceeding, "a probability", lambda q: 0 <= q <= 1)
    gap = jnp.maximum(mean_distances - threshold, 0)
    largest = radius * _sum_of_others(weights)
    tail = _tail(2 * gap**2, largest**2)
    if independent:
        squares = _sum_of_others(weights**2)
        tail = jnp.minimum(tail, _tail(gap**2, 2 * radius**2 * squares))
    return jnp.mean(tail) + exceeding


def paper_head_coverage(separability: float, num_heads: int) -> float:
    """Share of keys that at least one of H heads separates, ``1 - (1 - p)^H``, if heads were independent.

    Source: arXiv 2508.17821, Section 4. Heads that miss the same keys cover less, down to p.

    Raises:
      ValueError: separability not from 0 to 1, num_heads < 1.

    >>> from attnorm.theory import paper_head_coverage
    >>> print(round(paper_head_coverage(0.8, 3), 3))
    0.992
    """
    check("separability", separability, "from 0 to 1", lambda p: 0 <= p <= 1)
    check("num_heads", num_heads, "at least 1", lambda H: H >= 1)
    return 1 - (1 - separability) ** num_heads


def _sum_of_others(x):
    """Σ_(j≠i) x_j for every i. In ``Σ x - x_i`` an x_i that is nearly all of the sum leaves only rounding errors."""
    zero = jnp.zeros_like(x[:1])
    before = jnp.cumsum(jnp.concatenate([zero, x[:-1]]))
    after = jnp.cumsum(jnp.concatenate([zero, x[:0:-1]]))[::-1]
    return before + after


def _tail(numerator, denominator):
    """exp(-numerator / denominator), 1 where the denominator is 0."""
    return jnp.where(denominator > 0, jnp.exp(-numerator / jnp.where(denominator > 0, denominator, 1)), 1)


def _check_sphere(radius, min_distance):
    check_positive("radius", radius)
    check("min_distance", min_distance, "at least 0", lambda d: d >= 0)
