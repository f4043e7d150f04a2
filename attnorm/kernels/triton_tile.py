"""What the Triton kernels do alike with one tile of the T × S matrix.

A tile's rows are of the program's own side: queries, or, where keys get gradients, keys (the tile is transposed). Its
columns are a part of the other side, all of which the program walks through.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attnorm.masks import visible_pairs


class Inputs(NamedTuple):
    """Arrays of a kernel, or their blocks; absent ones are None. Letters as in attnorm.chunked; all are padded.

    query: (B, T, N, H), key: (B, S, K, H), value: (B, S, K, Hv).
    bias, mask: (B|1, N|1, T|1, S|1), mask in integers; transposed (.., S|1, T|1) for a transposed tile.
    query_ids, key_ids: (B, T) and (B, S).
    rule: the normaliser, with parameters (N,).
    tables: :class:`attnorm.kernels.schedule.Tables`.
    broken: (1,), whether anything is NaN or inf. Only where pairs can be hidden; then query, key and value have 0
    there, and query_mark (B, N, T), key_mark and value_mark (B, K, S) have NaN.
    d_output: (B, T, N, Hv), and rows: (B, N, 2 + statistics, T): m, g and the gradients of the statistics. For
    backward kernels.
    """

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    query_ids: Any
    key_ids: Any
    rule: Any
    tables: Any
    broken: Any
    query_mark: Any
    key_mark: Any
    value_mark: Any
    d_output: Any = None
    rows: Any = None


AXES = Inputs(
    query="bqn_",
    key="bsk_",
    value="bsk_",
    bias="bnqs",
    mask="bnqs",
    query_ids="bq",
    key_ids="bs",
    rule="n",
    tables="_",
    broken="_",
    query_mark="bnq",
    key_mark="bks",
    value_mark="bks",
    d_output="bqn_",
    rows="bn_q",
)
TRANSPOSED_AXES = AXES._replace(bias="bnsq", mask="bnsq")


class Place(NamedTuple):
    """A tile: batch entry, query head among those of the block, first row, first column, and (rows, columns)."""

    batch: Any
    head: Any
    row: Any
    column: Any
    shape: tuple[int, int]
    transposed: bool

    @property
    def columns(self):
        return pl.ds(self.column, self.shape[1])


def of_queries(ref, place: Place, *at):
    """A vector, one number for each query of the tile, against the tile."""
    return _of_columns(ref, place, at) if place.transposed else _of_rows(ref, at)


def of_keys(ref, place: Place, *at):
    """The same, of its keys."""
    return _of_rows(ref, at) if place.transposed else _of_columns(ref, place, at)


def _of_rows(ref, at):
    return ref[(*at, slice(None))][:, None]


def _of_columns(ref, place, at):
    return ref[(*at, place.columns)][None, :]


def rule_over(rule, head, shape):
    """The normaliser with this head's parameters spread over a shape."""
    return jax.tree.map(lambda ref: jnp.full(shape, ref[head], jnp.float32), rule)


def logits(static, refs: Inputs, place: Place, is_full, s):
    """The logits from the products of queries and keys, -inf at hidden pairs; and the soft cap's tanh or None.

    ``is_full``: whether every pair of the tile is visible.
    """
    if static.scale != 1:
        s = s * static.scale
    if refs.bias is not None:
        s = s + _pairs(refs.bias, place).astype(jnp.float32)

    def marked(s):
        s = s + of_queries(refs.query_mark, place, 0, place.head)
        return s + of_keys(refs.key_mark, place, 0, 0)

    s = where_broken(refs, marked, s)
    capped = None
    if static.logits_soft_cap is not None:
        capped = jnp.tanh(s / static.logits_soft_cap)
        s = static.logits_soft_cap * capped

    def masked(s):
        return jnp.where(_visible(static, refs, place), s, -jnp.inf)

    if is_full is False:
        s = masked(s)
    elif is_full is not True:  # not known until the kernel runs
        s = jax.lax.cond(is_full, lambda s: s, masked, s)
    return s, capped


def where_broken(refs: Inputs, change, x):
    """``change(x)`` if there is a NaN or inf that must not reach what is hidden from it, else x."""
    if refs.broken is None:
        return x
    return jax.lax.cond(refs.broken[0] != 0, change, lambda x: x, x)


def with_value_marks(refs: Inputs, place: Place, x):
    """x with NaN at keys whose values are not finite."""
    return where_broken(refs, lambda x: x + of_keys(refs.value_mark, place, 0, 0), x)


def at_visible(static, refs: Inputs, place: Place, s, x):
    """x with 0 at hidden pairs, where it is 0 already unless something is NaN."""

    def cut(x):
        if refs.bias is None:
            return jnp.where(s == -jnp.inf, 0, x)
        return jnp.where(_visible(static, refs, place), x, 0)  # a bias of -inf hides no NaN of a value

    return where_broken(refs, cut, x)


def _visible(static, refs, place):
    """Whether each query of the tile sees each key."""
    bounds = refs.tables.bounds

    def of_batch(ref):
        return None if ref is None else ref[0 if ref.shape[0] == 1 else place.batch]

    def positions(is_column):
        shape = (1, place.shape[1]) if is_column else (place.shape[0], 1)
        start = place.column if is_column else place.row
        return start + jax.lax.broadcasted_iota(jnp.int32, shape, int(is_column))

    ids = refs.query_ids is not None
    return visible_pairs(
        positions(place.transposed),
        positions(not place.transposed),
        left=static.left,
        right=static.right,
        offset=of_batch(bounds.offset),
        query_limit=of_batch(bounds.query_limit),
        key_limit=of_batch(bounds.key_limit),
        query_ids=of_queries(refs.query_ids, place, 0) if ids else None,
        key_ids=of_keys(refs.key_ids, place, 0) if ids else None,
        mask=None if refs.mask is None else _pairs(refs.mask, place) != 0,
    )


def _pairs(ref, place):
    """The tile of an array over batch, heads, and the axes of the tile, each full or of size 1."""
    head = 0 if ref.shape[1] == 1 else place.head
    return ref[0, head, :, slice(None) if ref.shape[3] == 1 else place.columns]
