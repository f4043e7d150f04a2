"""Distances and separability of many rows at once, from inner products instead of vectors.

With the Gram matrix ``G_ij = <x_i, x_j>`` and the masked weights m of a selection, ``s = Σ m_j x_j``:

    ‖s - α_i x_i‖² = m·Gm - 2 α_i (Gm)_i + α_i² G_ii

so a selection costs one product of m with G, whatever the dimension of x, and all selections and rows share
G. In float32 a distance far below ‖s‖ has an error of about ``3e-4 ‖s‖``, the root of that of its square; of
``3e-4 Σ |m_j| ‖x_j‖`` where the vectors cancel.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from attnorm.analysis.sources import Attention
from attnorm.normalizers import Normalizer
from attnorm.theory import (
    proved_distance_ceiling,
    proved_mean_distance_floor,
    proved_separability_upper_bound,
    retrieval_of_distances,
)

# Distances whose squares differ by no more than the square of this, in units of Σ |m| ‖x‖, are ties: repeated
# keys make them. Three times the usual error, so that no rounding breaks a tie.
_TIE = 1e-3
# Rows that are in memory at once: keeps 144 heads at L = 1024 below a gigabyte.
_ROWS_AT_ONCE = 32


class Rows(NamedTuple):
    """Some of the rows of a layer, and the inner products of what they select among."""

    logits: Float[Array, "N R S"]
    visible: Bool[Array, "R S"]
    position: Int[Array, "R"]
    gram: Float[Array, "G S S"]  # G is N, or 1 where all heads share the vectors
    counted: Bool[Array, "R S"]  # the keys that are inside or outside; hidden ones have weight 0


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """At most ``most`` indices below count, the last among them; all for most = 0.

    >>> from attnorm.analysis.selection.rows import evenly_spaced
    >>> evenly_spaced(10, 3).tolist(), evenly_spaced(3, 0).tolist()
    ([3, 6, 9], [0, 1, 2])
    """
    if most == 0 or most >= count:
        return np.arange(count)
    return np.ceil(count * np.arange(1, most + 1) / most).astype(int) - 1


def vectors_of(attention: Attention, vectors: str, unit: bool) -> Float[Array, "G S D"]:
    """The x of a layer's keys, per head for ``"values"``."""
    x = attention.values if vectors == "values" else attention.inputs[vectors][None]
    x = jnp.asarray(x, jnp.float32)
    if unit:
        norm = jnp.linalg.norm(x, axis=-1, keepdims=True)
        x = x / jnp.where(norm > 0, norm, 1)
    return x


def rows_of(attention: Attention, x: Float[Array, "G S D"], max_rows: int, hidden: str) -> Rows:
    """The chosen rows of a layer."""
    _, T, S = attention.logits.shape
    position = jnp.asarray(evenly_spaced(T, max_rows))
    visible = (
        jnp.arange(S) <= position[:, None] if attention.is_causal else jnp.ones((len(position), S), bool)
    )
    return Rows(
        attention.logits[:, position],
        visible,
        position,
        jnp.einsum("GSD,GUD->GSU", x, x, precision="highest"),
        visible if hidden == "left_out" else jnp.ones_like(visible),
    )


def row_weights(normalizer: Normalizer, rows: Rows) -> Float[Array, "N R S"]:
    """The weights of the rows under any normaliser."""
    return normalizer.weights(rows.logits, where=rows.visible, position=rows.position[:, None])


def random_ranks(counted: Bool[Array, "R S"], num_draws: int, seed: int) -> Int[np.ndarray, "M R S"]:
    """A random order of each row's counted keys, for each draw; its first N are a random selection."""
    noise = np.random.default_rng(seed).random((num_draws, *counted.shape))
    noise = np.where(counted, noise, 2)
    return np.argsort(np.argsort(noise, -1), -1).astype(np.int32)


@functools.partial(jax.jit, static_argnames=("num_selected", "aggregate", "with_bounds"))
def distance_rows(
    normalizer: Normalizer,
    rows: Rows,
    ranks: Int[Array, "M R S"],
    *,
    num_selected: tuple[int, ...],
    aggregate: str = "norms",
    with_bounds: bool = True,
) -> dict[str, Float[Array, "N R K"]]:
    """d̃ of the N largest weights and its mean over random selections, for every head, row and N.

    Args:
      normalizer: gives the weights.
      rows: of :func:`rows_of`.
      ranks: of :func:`random_ranks`.
      num_selected: the K values of N, ascending.
      aggregate: as in :func:`attnorm.theory.selection_distance`.
      with_bounds: whether Theorem 1's bounds are wanted: of 1.1 (``bound``, NaN where a weight is negative),
        of 1.2 (``expected_low``, ``_high``), and of Corollary 2 (``expected_ceiling``).

    Returns:
      ``distance``, ``expected``, and the bounds. Where a row has no more than N keys, they are 0, and the norm
      of the sum is that of all keys.
    """
    nums = jnp.asarray(num_selected)

    def row(weights, counted, ranks, gram):
        count = jnp.sum(counted)
        whole = gram @ weights  # <x_i, Σ α x>
        chosen = _largest(weights, counted, num_selected[-1])
        rank = jnp.full(weights.shape, weights.size).at[chosen].set(jnp.arange(chosen.size))

        def total(inside):
            masked = jnp.where(inside, weights, 0)
            products = masked @ gram
            if aggregate == "vector":
                # ‖2 s - Y‖, Y the sum over all keys.
                squared = 4 * jnp.sum(masked * products, -1) - 4 * masked @ whole + weights @ whole
                return jnp.sqrt(jnp.maximum(squared, 0))
            distances = _distances(weights, masked, products, gram)
            return jnp.sum(jnp.where(counted & ~inside, distances, 0), -1)

        def sampled(rank):
            # One selection with the heaviest key and one without, weighed by how likely these are: else a key
            # that holds nearly all weight, and is drawn by few rows, would leave nothing but noise.
            heaviest = jnp.arange(weights.size) == chosen[0]
            rank = rank - (rank > rank[chosen[0]])
            others = counted & ~heaviest
            share = jnp.minimum(nums / count, 1)
            with_it = total(((rank < nums[:, None] - 1) & others) | heaviest)
            return share * with_it + (1 - share) * total((rank < nums[:, None]) & others)

        distance = total((rank < nums[:, None]) & counted)
        result = {"distance": distance, "expected": jnp.mean(jax.vmap(sampled)(ranks), 0)}
        if with_bounds:
            result["bound"] = _theorem_1_1(weights, counted, chosen, rank, nums, gram)
            low, high, ceiling = _theorem_1_2(weights, counted, whole, nums, count, gram)
            result |= {"expected_low": low, "expected_high": high, "expected_ceiling": ceiling}
        return result

    return _over_heads_and_rows(normalizer, rows, row, (jnp.moveaxis(ranks, 1, 0),))


@functools.partial(jax.jit, static_argnames=("num_selected", "num_dims", "with_bounds"))
def separability_rows(
    normalizer: Normalizer,
    rows: Rows,
    radius: Float[Array, ""],
    min_distance: Float[Array, ""],
    thresholds: Float[Array, "Q"],
    *,
    num_selected: tuple[int, ...],
    num_dims: int,
    with_bounds: bool = True,
) -> dict[str, Float[Array, "N R K ..."]]:
    """Recall ``N_s / N``, precision and F of the N largest weights, and Theorem 2's bounds.

    A key of the selection that is as near as one outside, up to rounding, is not separated.

    Returns:
      ``recall``, ``precision`` and ``f``, (N R K), and bounds, NaN where a weight is negative: ``low``,
      ``1 - Σ ξ / (r N)`` or 0 with the row's own r, which holds for every row; ``paper_high``, the paper's
      upper form with that r; ``high``, (N R K Q): at each fixed threshold t, the row's part of the proved
      bound, 1 more if r > t: the bound is the mean over rows, and x of norm ``radius`` are wanted.
    """

    def row(weights, counted, _, gram):
        chosen = _largest(weights, counted, num_selected[-1])
        rank = jnp.full(weights.shape, weights.size).at[chosen].set(jnp.arange(chosen.size))

        def of(N):
            inside = (rank < N) & counted
            masked = jnp.where(inside, weights, 0)
            distances = _distances(weights, masked, masked @ gram, gram)
            # Keys that are not counted are neither inside nor outside.
            distances = jnp.where(counted, distances, jnp.inf)
            tie = _TIE * jnp.abs(masked) @ jnp.sqrt(jnp.diagonal(gram))
            retrieved = retrieval_of_distances(
                jnp.where(inside, jnp.hypot(distances, tie), distances), inside
            )._asdict()
            if not with_bounds:
                return retrieved
            nearest = jnp.min(jnp.where(inside, jnp.inf, distances))
            top = weights[chosen[:N]]
            ceiling = proved_distance_ceiling(top, radius=radius, min_distance=min_distance)
            floor = proved_mean_distance_floor(top, radius=radius, num_dims=num_dims)
            high = jax.vmap(
                lambda t: proved_separability_upper_bound(top, floor, radius=radius, threshold=t)
            )(thresholds)
            bounds = {
                # Nothing is strictly nearer than 0.
                "low": jnp.where(nearest > tie, jnp.maximum(1 - jnp.mean(ceiling) / nearest, 0), 0),
                "paper_high": jnp.mean(jnp.exp(-((ceiling - nearest) ** 2) / (2 * radius**2))),
                "high": high + (nearest > thresholds),
            }
            bounds = {key: jnp.where(_has_negative(weights), jnp.nan, bound) for key, bound in bounds.items()}
            return retrieved | bounds

        results = [of(N) for N in num_selected]
        return jax.tree.map(lambda *values: jnp.stack(values), *results)

    return _over_heads_and_rows(normalizer, rows, row, ())


def _over_heads_and_rows(normalizer, rows, row, extra):
    """Maps ``row(weights, counted, extra, gram)`` over heads, one at a time, and rows, a few at a time."""
    N = rows.logits.shape[0]

    def head(args):
        logits, gram = args
        gram = rows.gram[0] if gram is None else gram
        weights = normalizer.weights(logits, where=rows.visible, position=rows.position[:, None])
        return jax.lax.map(
            lambda args: row(*args[:2], args[2] if len(args) > 2 else None, gram),
            (weights.astype(jnp.float32), rows.counted, *extra),
            batch_size=_ROWS_AT_ONCE,
        )

    # Distances are small differences of inner products, for which accelerators' default precision is too
    # coarse.
    with jax.default_matmul_precision("highest"):
        return jax.lax.map(head, (rows.logits, rows.gram if rows.gram.shape[0] == N > 1 else None))


def _largest(weights, counted, num):
    """Indices of the counted keys with the largest weights, the largest first."""
    _, chosen = jax.lax.top_k(jnp.where(counted, weights, -jnp.inf), min(num, weights.size))
    return chosen


def _distances(weights, masked, products, gram):
    """‖s - α_i x_i‖ for all keys i; masked and products may have leading axes."""
    length = jnp.sum(masked * products, -1, keepdims=True)
    squared = length - 2 * weights * products + weights**2 * jnp.diagonal(gram)
    return jnp.sqrt(jnp.maximum(squared, 0))


def _theorem_1_1(weights, counted, chosen, rank, nums, gram):
    squares = jnp.diagonal(gram)
    pairs = squares + squares[chosen][:, None] - 2 * gram[chosen]
    last = jnp.minimum(nums, chosen.size) - 1
    # Over the first N chosen keys, for every N.
    farthest = jax.lax.cummax(pairs, axis=0)[last]
    longest = jax.lax.cummax(squares[chosen])[last]
    outside = (rank >= nums[:, None]) & counted
    farthest = jnp.sqrt(jnp.maximum(jnp.max(jnp.where(outside, farthest, 0), -1), 0))
    weight_outside = jnp.sum(jnp.where(outside, weights, 0), -1)
    weight_inside = jnp.sum(jnp.where(counted, weights, 0)) - weight_outside
    bracket = weight_inside * jnp.sum(outside, -1) - weight_outside
    bound = jnp.where(jnp.any(outside, -1), weight_outside * farthest + jnp.sqrt(longest) * bracket, 0)
    return jnp.where(_has_negative(weights), jnp.nan, bound)


def _theorem_1_2(weights, counted, whole, nums, count, gram):
    squares = weights**2 * jnp.diagonal(gram)
    along = weights * whole
    length = weights @ whole
    others = jnp.maximum(count - 1, 1)
    share = (nums / others)[:, None]
    mean_squared = share**2 * length - 2 * share * (1 + share) * along + (1 + share) ** 2 * squares
    spread = jnp.sum(squares) - squares - (length - 2 * along + squares) / others
    variance = share * (1 - share) * others / jnp.maximum(others - 1, 1) * jnp.maximum(spread, 0)
    excluded = jnp.maximum(count - nums, 0) / count

    def mean_distance(squared):
        return excluded * jnp.sum(jnp.where(counted, jnp.sqrt(jnp.maximum(squared, 0)), 0), -1)

    ceiling = (1 + nums) * excluded * jnp.sum(jnp.sqrt(squares))
    return mean_distance(mean_squared), mean_distance(mean_squared + jnp.maximum(variance, 0)), ceiling


def _has_negative(weights):
    """Whether the bounds do not apply: some normalisers give negative weights, others miss 0 by rounding."""
    return jnp.min(weights) < -1e-6 * jnp.max(jnp.abs(weights))
