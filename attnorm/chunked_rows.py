"""O(T)-memory attention for rules that ask for whole rows of logits: the reference, for a few queries at a time.

A tile of few queries has its logits with all keys in memory, as in :mod:`attnorm.chunked_solver`; every tile is
computed anew in the backward pass, which is plain automatic differentiation. No tile of keys is skipped, so causal
attention costs as much as full attention.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnorm import _compat, chunked, reference
from attnorm.dropout import Dropout
from attnorm.masks import Visibility
from attnorm.normalizers.rule import Normalizer

SERVES = reference.SERVES - {"level"}
_MOST_QUERIES = 64


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Float[Array, "b n t s"] | None,
    visibility: Visibility,
    normalizer: Normalizer,
    *,
    scale: float,
    logits_soft_cap: float | None,
    dropout: Dropout | None,
    precision,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"] | None]:
    """Output in query's dtype; there is no log-norm. No dimension may be 0."""
    T, S = query.shape[1], key.shape[1]
    largest = min(chunked.blocks_of(query).query, _MOST_QUERIES)
    sizes = chunked.sizes_of(query, key, chunked.BlockSizes(largest, S))
    arrays = (query, key, value, bias, visibility, normalizer, dropout)
    # Inside shard_map every input must vary over the same axes; the transpose of this sums the gradients.
    query, key, value, bias, visibility, normalizer, dropout = _compat.vary_alike(arrays)
    options = {"scale": scale, "logits_soft_cap": logits_soft_cap, "precision": precision}
    if sizes.nq == 1:
        return reference.attend(query, key, value, bias, visibility, normalizer, dropout=dropout, **options)
    padding = sizes.nq * sizes.bq - T
    padded = visibility.padded(T + padding, S)

    def in_tiles(x, axis):
        """x, padded, with the number of the tile of queries as its first axis."""
        x = jnp.pad(x, [(0, padding if a == axis else 0) for a in range(x.ndim)])
        x = x.reshape(*x.shape[:axis], sizes.nq, sizes.bq, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    # A bias for every query is cut beforehand: else each tile would add a gradient of the size of the whole.
    of_all, of_tiles = bias, None
    if bias is not None and bias.shape[2] != 1:
        of_all, of_tiles = None, in_tiles(bias, axis=2)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # inside a loop there is nothing to prevent
    def tile(start, query, own_bias):
        output, _ = reference.attend(
            query,
            key,
            value,
            of_all if own_bias is None else own_bias,
            padded.from_row(start, sizes.bq),
            normalizer,
            dropout=None if dropout is None else dropout.from_row(start),
            **options,
        )
        return output

    starts = sizes.bq * jnp.arange(sizes.nq, dtype=jnp.int32)
    output = jax.lax.map(lambda args: tile(*args), (starts, in_tiles(query, axis=1), of_tiles))
    return jnp.moveaxis(output, 0, 1).reshape(sizes.B, -1, *output.shape[3:])[:, :T], None
