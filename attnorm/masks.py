"""Which keys a query may see, as predicates on indices; a dense mask is made only tile by tile, on demand."""

from __future__ import annotations

import builtins
import functools
import operator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

# Rows of the mask that are summed at once where keys have to be counted one by one.
_COUNTED_AT_ONCE = 128


class Span(NamedTuple):
    """Consecutive tiles [start, stop); ``masked`` where some pair in them may be hidden."""

    start: int | Array
    stop: int | Array
    masked: bool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Visibility:
    """The conjunction of every restriction on which key j a query i may see.

    Band: ``i + offset - left <= j <= i + offset + right``; None is unbounded, causal attention has right = 0.
    Letters: B batch, N query heads, T queries, S keys. ``mask`` has shape (1|B, 1|N, 1|T, 1|S).

    Where the keys are a part of those that the queries see, ``first_key`` is the position of the first of them and
    ``num_visible`` how many of all keys each query sees: rules may ask. Keys are hidden by the other fields alone.
    """

    num_queries: int = field(metadata=dict(static=True))
    num_keys: int = field(metadata=dict(static=True))
    left: int | None = field(default=None, metadata=dict(static=True))
    right: int | None = field(default=None, metadata=dict(static=True))
    offset: Int[Array, ""] | Int[Array, "B"] | None = None
    query_lengths: Int[Array, "B"] | None = None
    key_lengths: Int[Array, "B"] | None = None
    query_segment_ids: Int[Array, "B T"] | None = None
    key_segment_ids: Int[Array, "B S"] | None = None
    mask: Bool[Array, "b n t s"] | None = None
    first_key: Int[Array, ""] | Int[Array, "B"] | None = None
    num_visible: Int[Array, "b n T"] | None = None

    def padded(self, num_queries: int, num_keys: int) -> Visibility:
        """The same restrictions, with arrays long enough to cut tiles up to these lengths."""

        def pad(x, axes):
            if x is None:
                return None
            widths = [(0, 0)] * x.ndim
            for axis, length in axes:
                if x.shape[axis] != 1:
                    widths[axis] = (0, length - x.shape[axis])
            return jnp.pad(x, widths)

        return replace(
            self,
            query_segment_ids=pad(self.query_segment_ids, [(1, num_queries)]),
            key_segment_ids=pad(self.key_segment_ids, [(1, num_keys)]),
            mask=pad(self.mask, [(2, num_queries), (3, num_keys)]),
            num_visible=pad(self.num_visible, [(2, num_queries)]),
        )

    def tile(
        self, i_start: int | Array, i_size: int, j_start: int | Array, j_size: int
    ) -> Bool[Array, "b n i j"]:
        """Whether each query of the tile sees each key. Dimensions b, n are 1 or full.

        Indices past num_queries or num_keys see nothing and are seen by nobody.
        """
        i = i_start + jax.lax.broadcasted_iota(jnp.int32, (1, 1, i_size, j_size), 2)
        j = j_start + jax.lax.broadcasted_iota(jnp.int32, (1, 1, i_size, j_size), 3)
        query_ids = key_ids = mask = None
        if self.query_segment_ids is not None:
            assert self.key_segment_ids is not None  # they come together
            query_ids = jax.lax.dynamic_slice_in_dim(self.query_segment_ids, i_start, i_size, axis=1)
            key_ids = jax.lax.dynamic_slice_in_dim(self.key_segment_ids, j_start, j_size, axis=1)
            query_ids, key_ids = query_ids[:, None, :, None], key_ids[:, None, None, :]
        if self.mask is not None:
            mask = slice_tile(self.mask, i_start, i_size, j_start, j_size)
        return visible_pairs(
            i,
            j,
            left=self.left,
            right=self.right,
            offset=None if self.offset is None else _per_batch(self.offset),
            query_limit=_limit(self.num_queries, self.query_lengths),
            key_limit=_limit(self.num_keys, self.key_lengths),
            query_ids=query_ids,
            key_ids=key_ids,
            mask=mask,
        )

    def from_row(self, start: int | Array, size: int) -> Visibility:
        """Of ``size`` queries alone, from this one on; rows past the last query see nothing.

        Arrays must be long enough: see :meth:`padded`.
        """

        def cut(x, axis):
            is_full = x is not None and x.shape[axis] != 1
            return jax.lax.dynamic_slice_in_dim(x, start, size, axis) if is_full else x

        lengths = self.query_lengths
        if lengths is not None or self.num_queries % size:
            lengths = jnp.reshape(
                jnp.minimum(self.num_queries, _or(lengths, self.num_queries)) - start, (-1,)
            )
        return replace(
            self,
            num_queries=size,
            offset=_or(self.offset, 0) + start,
            query_lengths=lengths,
            query_segment_ids=cut(self.query_segment_ids, 1),
            mask=cut(self.mask, 2),
            num_visible=cut(self.num_visible, 2),
        )

    def counting(self, counted: Bool[Array, "b n t s"]) -> Visibility:
        """The same, but rules that ask for the number of visible keys are told of these alone."""
        mask = counted if self.mask is None else self.mask & counted
        return replace(self, num_visible=replace(self, mask=mask).counts())

    def dense(self) -> Bool[Array, "b n T S"] | None:
        """The whole mask, or None where nothing is hidden."""
        lengths, ids = (self.query_lengths, self.key_lengths), self.query_segment_ids
        if all(x is None for x in (self.left, self.right, *lengths, ids, self.mask)):
            return None
        return self.tile(0, self.num_queries, 0, self.num_keys)

    def counts(self) -> Int[Array, "b n T"]:
        """How many keys each query sees. Dimensions b, n are 1 or full. Never O(T S) memory."""
        if self.num_visible is not None:
            return self.num_visible
        if self.mask is None and self.query_segment_ids is None:
            return self._counts_in_band()
        size = min(self.num_queries, _COUNTED_AT_ONCE)
        tiles = -(-self.num_queries // size)
        padded = self.padded(tiles * size, self.num_keys)

        def of_tile(tile):
            return jnp.sum(padded.tile(tile * size, size, 0, self.num_keys), axis=-1, dtype=jnp.int32)

        counts = of_tile(0)[None] if tiles == 1 else jax.lax.map(of_tile, jnp.arange(tiles))
        counts = jnp.moveaxis(counts, 0, 2)  # (b, n, tiles, size)
        return counts.reshape(*counts.shape[:2], -1)[..., : self.num_queries]

    def _counts_in_band(self):
        i = jax.lax.broadcasted_iota(jnp.int32, (1, 1, self.num_queries), 2)
        offset = jnp.reshape(0 if self.offset is None else self.offset, (-1, 1, 1))
        start: int | Array = 0
        stop = jnp.reshape(_limit(self.num_keys, self.key_lengths), (-1, 1, 1))
        # The clips keep the sums inside int32, beyond every index.
        if self.left is not None:
            start = jnp.maximum(jnp.clip(offset - self.left, -(2**30), 2**30) + i, 0)
        if self.right is not None:
            stop = jnp.minimum(jnp.clip(offset + self.right, -(2**30), 2**30) + i + 1, stop)
        counts = jnp.maximum(stop - start, 0)
        query_limit = jnp.reshape(_limit(self.num_queries, self.query_lengths), (-1, 1, 1))
        return jnp.where(i < query_limit, counts, 0)

    def key_spans(self, i_start: int | Array, i_size: int, j_size: int, num_tiles: int) -> list[Span]:
        """The tiles of keys that a tile of queries has to visit, in order; all others are hidden."""
        i_stop = i_start + i_size
        offset_min, offset_max = self._offset_range()
        some = every = (0, self.num_keys)
        if self.left is not None:
            some = (i_start + offset_min - self.left, some[1])
            every = (i_stop - 1 + offset_max - self.left, every[1])
        if self.right is not None:
            some = (some[0], i_stop + offset_max + self.right)
            every = (every[0], i_start + offset_min + self.right + 1)
        return self._spans(
            some,
            every,
            j_size,
            num_tiles,
            self.num_keys,
            self.key_lengths,
            self.query_lengths,
            i_start,
            i_stop,
        )

    def query_spans(self, j_start: int | Array, j_size: int, i_size: int, num_tiles: int) -> list[Span]:
        """The tiles of queries that a tile of keys has to visit, in order; no others see it."""
        j_stop = j_start + j_size
        offset_min, offset_max = self._offset_range()
        some = every = (0, self.num_queries)
        if self.right is not None:
            some = (j_start - offset_max - self.right, some[1])
            every = (j_stop - 1 - offset_min - self.right, every[1])
        if self.left is not None:
            some = (some[0], j_stop - offset_min + self.left)
            every = (every[0], j_start - offset_max + self.left + 1)
        if j_size * -(-self.num_keys // j_size) != self.num_keys:  # the last tile has keys that nobody sees
            every = (every[0], _where(j_stop > self.num_keys, 0, every[1]))
        return self._spans(
            some,
            every,
            i_size,
            num_tiles,
            self.num_queries,
            self.query_lengths,
            self.key_lengths,
            j_start,
            j_stop,
        )

    def _offset_range(self):
        if self.offset is None:
            return 0, 0
        return jnp.min(self.offset), jnp.max(self.offset)

    def _spans(self, some, every, size, num_tiles, count, lengths, own_lengths, own_start, own_stop):
        """Tiles of the range ``some``, split where every pair is visible: in the range ``every``.

        ``lengths`` bound the tiles' own axis, ``own_lengths`` the axis of the tile [own_start, own_stop).
        """
        stop = _min(some[1], count)
        full_stop = _min(every[1], count)
        if lengths is not None:
            stop, full_stop = _min(stop, jnp.max(lengths)), _min(full_stop, jnp.min(lengths))
        if own_lengths is not None:
            stop = _where(own_start < jnp.max(own_lengths), stop, 0)
            full_stop = _where(own_stop <= jnp.min(own_lengths), full_stop, 0)
        first = _clip(some[0] // size, 0, num_tiles)
        last = _clip(-(-stop // size), first, num_tiles)
        if self.mask is not None or self.query_segment_ids is not None:
            spans = [Span(first, last, True)]
        else:
            first_full, last_full = first, last
            if not _is_same(some[0], every[0]):
                first_full = _clip(-(-every[0] // size), first, last)
            if not (_is_same(stop, full_stop) and _is_same(stop, num_tiles * size)):
                last_full = _clip(full_stop // size, first_full, last)
            spans = [
                Span(first, first_full, True),
                Span(first_full, last_full, False),
                Span(last_full, last, True),
            ]
        return [span for span in spans if not _is_empty(span)]


def visible_pairs(
    i: Array, j: Array, *, left, right, offset, query_limit, key_limit, query_ids, key_ids, mask
) -> Bool[Array, "..."]:
    """Whether query i sees key j, for index arrays; the rest broadcasts against them, and is None where absent."""
    conditions = []
    if query_limit is not None:
        conditions.append(i < query_limit)
    if key_limit is not None:
        conditions.append(j < key_limit)
    if left is not None or right is not None:
        # Of the form j <= i': what varies along one axis alone costs nothing per pair.
        offset = 0 if offset is None else offset
        if right is not None:
            conditions.append(j <= i + (offset + right))
        if left is not None:
            conditions.append(j >= i + (offset - left))
    if query_ids is not None:
        conditions.append(query_ids == key_ids)
    if mask is not None:
        conditions.append(mask)
    return functools.reduce(operator.and_, conditions)


def slice_tile(x: Array, i_start: int | Array, i_size: int, j_start: int | Array, j_size: int) -> Array:
    """The tile of an array whose last two axes are queries and keys, each full or of size 1."""
    if x.shape[-2] != 1:
        x = jax.lax.dynamic_slice_in_dim(x, i_start, i_size, axis=-2)
    if x.shape[-1] != 1:
        x = jax.lax.dynamic_slice_in_dim(x, j_start, j_size, axis=-1)
    return x


def _limit(length, lengths):
    return length if lengths is None else jnp.minimum(length, _per_batch(lengths))


def _or(x, default):
    return default if x is None else x


def _per_batch(x):
    """A scalar, or one value per batch entry, against (B, N, T, S)."""
    return jnp.reshape(x, (-1, 1, 1, 1))


# Bounds stay Python numbers where everything they depend on is known, so that empty spans are never traced.


def _is_static(*values):
    return all(isinstance(value, int) for value in values)


def _is_empty(span):
    return span.start is span.stop or (_is_static(span.start, span.stop) and span.start >= span.stop)


def _is_same(a, b):
    return a is b or (_is_static(a, b) and a == b)


def _min(a, b):
    return builtins.min(a, b) if _is_static(a, b) else jnp.minimum(a, b)


def _clip(x, low, high):
    return builtins.max(low, builtins.min(x, high)) if _is_static(x, low, high) else jnp.clip(x, low, high)


def _where(condition, a, b):
    if isinstance(condition, bool):
        return a if condition else b
    return jnp.where(condition, a, b)
