"""What the GPU kernels do alike with one tile of the T × S matrix, by one warpgroup, in registers.

A tile is queries × keys where rows of queries are the result, and transposed, keys × queries, where keys are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attnorm.kernels.gpu_rule import tanh
from attnorm.kernels.schedule import Tables
from attnorm.masks import visible_pairs

# Rows of a tile that one warpgroup holds: the height of its matrix instruction.
ROWS = 64
# Registers of the warpgroup that only moves memory.
MEMORY_REGISTERS = 24
_TRANSFORMS = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


class Inputs(NamedTuple):
    """Arrays of a kernel, in global memory; absent ones are None. Letters as in attnorm.chunked.

    query: (B, T, N, H), key: (B, S, K, H), value: (B, S, K, Hv).
    bias, mask: (B|1, N|1, T|1, S|1), mask in int8; transposed (.., S|1, T|1) for a transposed tile.
    query_ids, key_ids: (B, T) and (B, S).
    rule: the normaliser, with parameters (N,).
    d_output: (B, T, N, Hv), and rows: (B, N, 2 + statistics, T): m, g and the gradients of the statistics. For
    backward kernels.

    All but the first three and d_output are padded to whole tiles: the copy engine fills those with zeros.
    """

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    query_ids: Any
    key_ids: Any
    rule: Any
    tables: Tables
    d_output: Any = None
    rows: Any = None


class Place(NamedTuple):
    """A tile: batch entry, query head, first query, first key, and (rows, columns)."""

    batch: Any
    head: Any
    i: Any
    j: Any
    shape: tuple[int, int]
    transposed: bool

    @property
    def query_axis(self):
        return 1 if self.transposed else 0


def matrix(*shape, dtype):
    """Shared memory for a matrix, or several, as the matrix instruction reads it."""
    return plgpu.SMEM(shape, dtype, transforms=_TRANSFORMS)


def block(shape, index_map):
    """Blocks of a matrix, for a pipeline."""
    return plgpu.BlockSpec(shape, index_map, transforms=_TRANSFORMS)


def product(a, b, shape):
    """a @ b in float32."""

    def compute(accumulator):
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(compute, plgpu.ACC(shape, jnp.float32))


def add_product(static, total, a, b):
    """total + a @ b in float32, with a in registers."""
    if static.interpret:  # which multiplies from shared memory alone
        total = total + jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # else it takes this read to race with the copy that comes next
        return total
    return pl.run_state(lambda accumulator: plgpu.wgmma(accumulator, a, b))(plgpu.ACC.init(total))


def zeros(*shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def rows(ref, start, size):
    """A vector from global memory, one number for each row of a tile."""
    return _vector(ref.at[pl.ds(start, size)], axis=0)


def over_rows(x, shape):
    """One number for each row, over the tile."""
    return jax.lax.broadcast_in_dim(x, shape, (0,))


def over(ref, start, axis, shape):
    """A vector from global memory that starts there, along one axis of the tile, over the tile."""
    return jax.lax.broadcast_in_dim(_vector(ref.at[pl.ds(start, shape[axis])], axis), shape, (axis,))


def _vector(ref, axis):
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)


def rule_over(rule, head, shape):
    """The normaliser with this head's parameters spread over a shape."""
    return jax.tree.map(lambda ref: jnp.full(shape, ref[head], jnp.float32), rule)


def logits(static, inputs: Inputs, place: Place, is_full, s):
    """The logits from the products of queries and keys, -inf at hidden pairs; and the soft cap's tanh or None.

    ``is_full``: whether every pair of the tile is visible.
    """
    if static.scale != 1:
        s = s * static.scale
    if inputs.bias is not None:
        s = s + _pairs(inputs.bias, place).astype(jnp.float32)
    capped = None
    if static.logits_soft_cap is not None:
        capped = tanh(s * (1 / static.logits_soft_cap))
        s = static.logits_soft_cap * capped

    def masked(s):
        return jnp.where(visible(static, inputs, place), s, -jnp.inf)

    if is_full is False:
        s = masked(s)
    elif is_full is not True:  # not known until the kernel runs
        s = jax.lax.cond(is_full, lambda s: s, masked, s)
    return s, capped


def visible(static, inputs: Inputs, place: Place):
    """Whether each query of the tile sees each key."""
    bounds = inputs.tables.bounds

    def of_batch(ref):
        return None if ref is None else ref[0 if ref.shape[0] == 1 else place.batch]

    def positions(start, axis):
        return start + plgpu.broadcasted_iota(jnp.int32, place.shape, axis, layout=plgpu.Layout.WGMMA)

    def ids(ref, start, axis):
        return None if ref is None else over(ref.at[place.batch], start, axis, place.shape)

    query_axis, key_axis = place.query_axis, 1 - place.query_axis
    return visible_pairs(
        positions(place.i, query_axis),
        positions(place.j, key_axis),
        left=static.left,
        right=static.right,
        offset=of_batch(bounds.offset),
        query_limit=of_batch(bounds.query_limit),
        key_limit=of_batch(bounds.key_limit),
        query_ids=ids(inputs.query_ids, place.i, query_axis),
        key_ids=ids(inputs.key_ids, place.j, key_axis),
        mask=None if inputs.mask is None else _pairs(inputs.mask, place).astype(jnp.int32) != 0,
    )


def _pairs(ref, place):
    """The tile of an array over batch, heads, and the axes of the tile, each full or of size 1."""
    b, n = (0 if size == 1 else at for size, at in zip(ref.shape[:2], (place.batch, place.head), strict=True))
    ref = ref.at[b, n]
    starts = (place.j, place.i) if place.transposed else (place.i, place.j)
    if ref.shape == (1, 1):
        return jnp.full(place.shape, ref[0, 0])
    if 1 in ref.shape:
        axis = 1 if ref.shape[0] == 1 else 0
        ref = ref.at[0] if axis == 1 else ref.at[:, 0]
        return over(ref, starts[axis], axis, place.shape)
    ref = ref.at[tuple(pl.ds(start, size) for start, size in zip(starts, place.shape, strict=True))]
    return plgpu.load(ref, layout=plgpu.Layout.WGMMA, optimized=False)
