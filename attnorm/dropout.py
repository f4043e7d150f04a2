"""Attention dropout from a counter hash of (batch, head, query, key), so that no tile size changes it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Dropout:
    """Each normalised weight is dropped with probability ``rate``; those kept are scaled by 1 / (1 - rate).

    Where a call sees a part of the queries, ``first_query`` is the position of the first of them.
    """

    rate: float = field(metadata=dict(static=True))
    seed: UInt32[Array, "2"]
    first_query: int | Int[Array, ""] | None = None

    @staticmethod
    def from_key(rate: float, key: Array) -> Dropout:
        return Dropout(rate, jax.random.bits(key, (2,), jnp.uint32))

    def from_row(self, start: int | Array) -> Dropout:
        """Of the queries from this one on."""
        return replace(self, first_query=start)

    def tile(
        self, shape: tuple[int, int], i_start: int | Array, i_size: int, j_start: int | Array, j_size: int
    ) -> Float[Array, "B N i j"]:
        """The factors, 0 or 1 / (1 - rate), of a tile; ``shape`` is (B, N)."""

        def indices(axis, start=0):
            full = (*shape, i_size, j_size)
            size = [n if k == axis else 1 for k, n in enumerate(full)]
            return (start + jax.lax.broadcasted_iota(jnp.int32, size, axis)).astype(jnp.uint32)

        # Two words name a head, so that no two heads share them: with one, heads whose words differ by less than T
        # would drop the same pairs, in another order of rows.
        if self.first_query is not None:
            i_start = self.first_query + i_start
        batch, head = indices(0), indices(1)
        row_word = _mix(_mix(self.seed[0] ^ batch) ^ head)
        column_word = _mix(_mix(self.seed[1] ^ batch) ^ head)
        bits = _mix(_mix(row_word ^ indices(2, i_start)) ^ _mix(column_word ^ indices(3, j_start)))
        threshold = jnp.uint32(min(round(self.rate * 2**32), 2**32 - 1))
        return jnp.where(bits >= threshold, 1 / (1 - self.rate), 0.0).astype(jnp.float32)


def _mix(x: Array) -> Array:
    """A bijective finaliser of 32 bits (xor-shift and multiply) with full avalanche.

    Constants: "lowbias32", Chris Wellons, 2018.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)
