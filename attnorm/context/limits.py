"""What hides keys from the queries of one device, among all keys of the sequence."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from attnorm.context.order import Order
from attnorm.masks import Visibility

# No index reaches it, and sums of two such numbers stay inside int32.
_BEYOND_ALL = 2**30 - 1


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Limits:
    """As in :class:`attnorm.masks.Visibility`, of the whole sequence; segment ids of the device's own blocks."""

    left: int | None = field(metadata=dict(static=True))
    right: int | None = field(metadata=dict(static=True))
    offset: Int[Array, ""] | Int[Array, "B"] | None
    query_lengths: Int[Array, "b"] | None
    key_lengths: Int[Array, "b"] | None
    query_ids: Int[Array, "blocks B t"] | None
    key_ids: Int[Array, "blocks B s"] | None

    def visibility(self, block, first_query, num_queries, first_key, num_keys) -> Visibility:
        """For one block of this device's queries and keys from ``first_key`` on; without those keys' segment ids."""

        def part(lengths, first, size):
            return None if lengths is None else jnp.clip(lengths - first, 0, size)

        offset = first_query - first_key + (0 if self.offset is None else self.offset)
        return Visibility(
            num_queries=num_queries,
            num_keys=num_keys,
            left=self.left,
            right=self.right,
            offset=jnp.clip(offset, -_BEYOND_ALL, _BEYOND_ALL),
            query_lengths=part(self.query_lengths, first_query, num_queries),
            key_lengths=part(self.key_lengths, first_key, num_keys),
            query_segment_ids=None if self.query_ids is None else self.query_ids[block],
        )

    def counts(self, order: Order, num_queries: int, num_keys: int) -> Int[Array, "blocks b 1 t"]:
        """How many of all keys each query sees; blocks have so many queries and keys."""
        device = jax.lax.axis_index(order.axis)
        key_ids = None if self.key_ids is None else order.all_blocks(self.key_ids)
        blocks = []
        for block in range(order.num_blocks):
            first_query = order.block(device, block) * num_queries
            all_keys = order.num_devices * order.num_blocks * num_keys
            visibility = self.visibility(block, first_query, num_queries, 0, all_keys)
            blocks.append(replace(visibility, key_segment_ids=key_ids).counts())
        return jnp.stack(blocks)
