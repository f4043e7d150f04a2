"""Where the logits of attention stand, for rules that ask: the query's position, its number of keys, the distance."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attnorm.masks import Visibility
from attnorm.normalizers.rule import Normalizer, Place


def dense_place(normalizer: Normalizer, visibility: Visibility, dtype) -> Place:
    """Of all logits (B, N, T, S)."""
    if not normalizer.needs & {"position", "count", "distance"}:
        return Place()
    counts = visibility.counts()[..., None] if "count" in normalizer.needs else None
    first_key = _per_batch(visibility.first_key)
    return place_of(
        normalizer,
        first_key + _per_batch(visibility.offset) + _iota(visibility.num_queries, 2),
        first_key + _iota(visibility.num_keys, 3),
        counts,
        dtype,
    )


def place_of(normalizer: Normalizer, position, key, counts, dtype) -> Place:
    """Of logits at these integer positions of queries and keys, which broadcast against each other."""
    needs = normalizer.needs
    return Place(
        position=position.astype(dtype) if "position" in needs else None,
        count=jnp.maximum(counts, 1).astype(dtype) if "count" in needs else None,
        distance=(position - key).astype(dtype) if "distance" in needs else None,
    )


def tile_place(normalizer, visibility, counts, i_start, i_size, j_start, j_size, dtype) -> Place:
    """Of one tile of queries and keys, (b, 1, 1, i, j); ``counts`` (b, k, g, i, 1) are the tile's own."""
    first_key = _per_batch(visibility.first_key)[:, None]
    position = first_key + _per_batch(visibility.offset)[:, None] + i_start + _iota(i_size, 3, 5)
    return place_of(normalizer, position, first_key + j_start + _iota(j_size, 4, 5), counts, dtype)


def _per_batch(x):
    """A scalar, or one value per batch entry, 0 where None, against (B, N, T, S)."""
    return jnp.reshape(0 if x is None else x, (-1, 1, 1, 1))


def _iota(size, axis, rank=4):
    shape = [1] * rank
    shape[axis] = size
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)
