"""Which tiles of the T × S matrix a kernel computes, which of them it masks, and which it fetches next.

A kernel walks tiles of an outer axis (queries forward, keys backward) and, for each, tiles of the inner one. The
tables live in scalar memory, so they hold a few numbers per outer tile and nothing of size T × S.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from attnorm.masks import Visibility


@dataclass(frozen=True)
class Tiling:
    """T queries and S keys, cut into nq tiles of bq queries and nk tiles of bk keys."""

    T: int
    S: int
    bq: int
    bk: int

    @property
    def nq(self):
        return -(-self.T // self.bq)

    @property
    def nk(self):
        return -(-self.S // self.bk)


class Bounds(NamedTuple):
    """What restricts pairs by their positions; each of shape (1,) or (B,), or None."""

    offset: Int[Array | np.ndarray, "b"] | None
    query_limit: Int[Array | np.ndarray, "b"] | None
    key_limit: Int[Array | np.ndarray, "b"] | None


def make_bounds(visibility: Visibility, tiling: Tiling, first_query: int | Array = 0) -> Bounds:
    """The bounds for queries counted from ``first_query``; padding is hidden as lengths are."""

    def limit(length, lengths, is_padded):
        if lengths is not None:
            return jnp.minimum(lengths, length)
        return np.full(1, length, np.int32) if is_padded else None

    offset = None
    if visibility.left is not None or visibility.right is not None:
        offset = np.zeros(1, np.int32) if visibility.offset is None else jnp.reshape(visibility.offset, -1)
        offset = offset + first_query
    cut = not (isinstance(first_query, int) and visibility.num_queries == tiling.nq * tiling.bq)
    query_limit = limit(visibility.num_queries, visibility.query_lengths, cut)
    return Bounds(
        offset,
        None if query_limit is None else query_limit - first_query,
        limit(visibility.num_keys, visibility.key_lengths, tiling.S != tiling.nk * tiling.bk),
    )


_START, _STOP, _FULL_START, _FULL_STOP, _NEXT_START = range(5)
_SPAN_ROWS = 5


class Tables(NamedTuple):
    """Contents of scalar memory, each flat; ``segments`` are the smallest and largest id of every tile."""

    spans: Int[Array, "_"] | None
    bounds: Bounds
    outer_segments: Int[Array, "_"] | None
    inner_segments: Int[Array, "_"] | None


@dataclass(frozen=True)
class Schedule:
    """How to read the tables. Rows of ``spans`` that say nothing are never read: index maps run at every step."""

    num_outer: int
    num_inner: int
    spans_per_batch: bool
    from_first: bool  # no outer tile starts later than at inner tile 0
    to_last: bool  # none stops earlier than at the end
    always_masked: bool

    def needed(self, tables: Tables, b, outer, inner):
        """Whether some pair of the tile may be visible."""
        needed = self._within(tables, (_START, _STOP), b, outer, inner)
        if tables.outer_segments is not None:
            (outer_min, outer_max), (inner_min, inner_max) = self._segments(tables, b, outer, inner)
            needed &= (outer_min <= inner_max) & (inner_min <= outer_max)
        return needed

    def full(self, tables: Tables, b, outer, inner):
        """Whether every pair of the tile is visible."""
        if self.always_masked:
            return False
        full = self._within(tables, (_FULL_START, _FULL_STOP), b, outer, inner)
        if tables.outer_segments is not None:
            (outer_min, outer_max), (inner_min, inner_max) = self._segments(tables, b, outer, inner)
            full &= (outer_min == inner_max) & (inner_min == outer_max)
        return full

    def span(self, tables: Tables, b, outer):
        """The inner tiles [start, stop) that hold every needed one; start >= stop where none is."""
        start = 0 if self.from_first else self._span(tables, _START, b, outer)
        stop = self.num_inner if self.to_last else self._span(tables, _STOP, b, outer)
        return start, stop

    def fetch(self, tables: Tables, b, outer, inner):
        """The inner tile to have in memory: on a skipped step the next one needed, so that it is there in time."""
        tile = inner
        if not self.from_first:
            tile = jnp.maximum(tile, self._span(tables, _START, b, outer))
        if self.to_last:
            tile = jnp.minimum(tile, self.num_inner - 1)  # an empty outer tile starts beyond the last
        else:
            following = 0 if self.from_first else self._span(tables, _NEXT_START, b, outer)
            tile = jnp.where(inner < self._span(tables, _STOP, b, outer), tile, following)
        return tile

    def _within(self, tables, rows, b, outer, inner):
        within = True
        if not self.from_first:
            within &= self._span(tables, rows[0], b, outer) <= inner
        if not self.to_last:
            within &= inner < self._span(tables, rows[1], b, outer)
        return within

    def _span(self, tables, row, b, outer):
        if self.spans_per_batch:
            outer = b * self.num_outer + outer
        return tables.spans[row * (tables.spans.shape[0] // _SPAN_ROWS) + outer]

    def _segments(self, tables, b, outer, inner):
        def pair(table, count, tile):
            half = table.shape[0] // 2
            return table[b * count + tile], table[half + b * count + tile]

        return (
            pair(tables.outer_segments, self.num_outer, outer),
            pair(tables.inner_segments, self.num_inner, inner),
        )


def make_schedule(
    visibility: Visibility, tiling: Tiling, bounds: Bounds, *, keys_outer: bool
) -> tuple[Schedule, Tables]:
    """The schedule of one kernel. Segment ids must be padded to whole tiles by repeating the last id."""
    low = high = None
    if visibility.left is not None:
        assert bounds.offset is not None  # as of every band
        low = bounds.offset - visibility.left
    if visibility.right is not None:
        assert bounds.offset is not None
        high = bounds.offset + visibility.right
    queries = (tiling.nq, tiling.bq, bounds.query_limit)
    keys = (tiling.nk, tiling.bk, bounds.key_limit)
    outer, inner = queries, keys
    if keys_outer:
        low, high = (None if x is None else -x for x in (high, low))
        outer, inner = keys, queries
    has_segments = visibility.query_segment_ids is not None
    spans = outer_segments = inner_segments = None
    per_batch = False
    if has_segments or any(x is not None for x in (low, high, outer[2], inner[2])):
        spans = _spans(outer, inner, low, high)
        if has_segments:
            query_range = _segment_ranges(visibility.query_segment_ids, tiling.bq)
            key_range = _segment_ranges(visibility.key_segment_ids, tiling.bk)
            outer_range, inner_range = (key_range, query_range) if keys_outer else (query_range, key_range)
            spans = _within_segments(spans, outer_range, inner_range)
            outer_segments, inner_segments = outer_range.reshape(-1), inner_range.reshape(-1)
        per_batch = spans[0].shape[0] > 1
        spans = _flat(inner[0], *spans)
    schedule = Schedule(
        outer[0],
        inner[0],
        per_batch,
        from_first=low is None and not has_segments,
        to_last=high is None and outer[2] is None and inner[2] is None and not has_segments,
        always_masked=visibility.mask is not None,
    )
    return schedule, Tables(spans, bounds, outer_segments, inner_segments)


def _spans(outer, inner, low, high):
    """Start and stop of the needed inner tiles, start and stop of those fully visible; each (b, outer tiles).

    A pair is visible if ``outer + low <= inner <= outer + high`` and both are below their limits.
    """
    num_outer, outer_size, outer_limit = outer
    num_inner, inner_size, inner_limit = inner
    # In NumPy if all is known now, which makes the table a constant of the program.
    xp = jnp if any(isinstance(x, jax.Array) for x in (low, high, outer_limit, inner_limit)) else np
    first = np.arange(num_outer, dtype=np.int32) * outer_size
    last = first + outer_size - 1
    start = full_start = np.zeros((1, num_outer), np.int32)
    stop = full_stop = np.full((1, num_outer), num_inner * inner_size, np.int32)
    if low is not None:
        start, full_start = first + low[:, None], last + low[:, None]
    if high is not None:
        end = last if outer_limit is None else xp.minimum(last, outer_limit[:, None] - 1)
        stop, full_stop = end + high[:, None] + 1, first + high[:, None] + 1
    if inner_limit is not None:
        stop, full_stop = (xp.minimum(x, inner_limit[:, None]) for x in (stop, full_stop))
    stop = xp.where(start < stop, stop, 0)
    start = xp.clip(start // inner_size, 0, num_inner)
    stop = xp.clip(-(-stop // inner_size), 0, num_inner)
    full_start, full_stop = -(-full_start // inner_size), full_stop // inner_size
    if outer_limit is not None:
        stop = xp.where(first < outer_limit[:, None], stop, 0)
        full_stop = xp.where(last < outer_limit[:, None], full_stop, 0)
    return xp.broadcast_arrays(start, stop, full_start, full_stop)


def _segment_ranges(ids, size):
    """(2, B, tiles): the smallest and the largest id of every tile."""
    tiles = ids.reshape(ids.shape[0], -1, size)
    return jnp.stack([tiles.min(-1), tiles.max(-1)])


def _within_segments(spans, outer_range, inner_range):
    """The spans cut to the first and last inner tile that shares an id with the outer one."""
    (outer_min, outer_max), (inner_min, inner_max) = outer_range, inner_range
    shares = outer_min[:, :, None] <= inner_max[:, None, :]
    shares &= inner_min[:, None, :] <= outer_max[:, :, None]
    tile = jnp.arange(shares.shape[-1], dtype=jnp.int32)
    start = jnp.min(jnp.where(shares, tile, shares.shape[-1]), axis=-1)
    stop = jnp.max(jnp.where(shares, tile + 1, 0), axis=-1)
    return jnp.broadcast_arrays(jnp.maximum(spans[0], start), jnp.minimum(spans[1], stop), *spans[2:])


def _flat(num_inner, start, stop, full_start, full_stop):
    """The spans as one table, with the start of the next outer tile as a fifth row. Each half says "empty"."""
    xp = jnp if isinstance(start, jax.Array) else np
    empty = start >= stop
    following = xp.roll(xp.where(empty, 0, start), -1, axis=1)
    start, stop = xp.where(empty, num_inner, start), xp.where(empty, 0, stop)
    rows = [start, stop, full_start, full_stop, following]
    return xp.concatenate([xp.ravel(x) for x in rows]).astype(np.int32)
