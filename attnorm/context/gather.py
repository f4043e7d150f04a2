"""Attention for which every device gathers the keys and values of all: simpler than a ring, for few devices.

It needs memory for all of them, cannot transfer while it computes, and serves every normaliser.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnorm.context.limits import Limits
from attnorm.context.order import Order
from attnorm.normalizers.rule import Normalizer


def attend(
    attention: Callable,
    query_order: Order,
    key_order: Order,
    query: Float[Array, "blocks B t N H"],
    key: Float[Array, "blocks B s K H"],
    value: Float[Array, "blocks B s K Hv"],
    normalizer: Normalizer,
    limits: Limits,
) -> tuple[Float[Array, "blocks B t N Hv"], Float[Array, "blocks B t N"]] | Float[Array, "blocks B t N Hv"]:
    """What ``attention``, a partial of ``attnorm.dot_product_attention``, returns for this device's queries."""
    key, value = key_order.all_blocks(key), key_order.all_blocks(value)
    key_ids = None if limits.key_ids is None else key_order.all_blocks(limits.key_ids)
    device = jax.lax.axis_index(query_order.axis)
    B, t = query.shape[1:3]

    def of_batch(lengths):
        return None if lengths is None else jnp.broadcast_to(lengths, (B,))

    def of_block(block):
        first_query = query_order.block(device, block) * t
        visibility = limits.visibility(block, first_query, t, 0, key.shape[1])
        return attention(
            query[block],
            key,
            value,
            normalizer=normalizer,
            query_offset=visibility.offset,
            local_window_size=(limits.left, limits.right),
            query_seq_lengths=of_batch(visibility.query_lengths),
            key_value_seq_lengths=of_batch(visibility.key_lengths),
            query_segment_ids=visibility.query_segment_ids,
            key_value_segment_ids=key_ids,
        )

    if query_order.num_blocks == 1:
        return jax.tree.map(lambda x: x[None], of_block(0))
    return jax.lax.map(of_block, jnp.arange(query_order.num_blocks))
