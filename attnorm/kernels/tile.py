"""What forward and backward kernels do alike with one tile of the T × S matrix.

A tile is queries × keys in the forward pass, and transposed, keys × queries, in the backward pass: then the row
state of the queries lies along the lanes, and the products for dk and dv need no transpose.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attnorm.finite import finite_or_zero
from attnorm.kernels.config import LANES
from attnorm.kernels.schedule import Bounds
from attnorm.masks import visible_pairs


class Inputs(NamedTuple):
    """Arrays of a kernel, or their blocks; absent ones are None. Letters as in attnorm.chunked.

    query: (B, N, T, H), key: (B, K, S, H), value: (B, K, S, Hv).
    bias, mask: (B|1, N|1, T|1, S|1), mask in int8; transposed (.., S|1, T|1) for backward kernels.
    query_ids, key_ids: (B, T, 1) and (B, 1, S), or transposed.
    rule: the normaliser, with parameters (N, 8, 128).
    d_output: (B, N, T, Hv), times the row factor; m, d_stats: (B, N, 1, T). For backward kernels.
    """

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    query_ids: Any
    key_ids: Any
    rule: Any
    d_output: Any = None
    m: Any = None
    d_stats: Any = None


AXES = Inputs("bnq_", "bks_", "bks_", "bnqs", "bnqs", "bq_", "b_s", "n__")
TRANSPOSED_AXES = AXES._replace(
    bias="bnsq", mask="bnsq", query_ids="b_q", key_ids="bs_", d_output="bnq_", m="bn_q", d_stats="bn_q"
)


def block_spec(x, axes: str, blocks: dict[str, int], locate) -> pl.BlockSpec:
    """The blocks of an array whose dimensions have these letters; ``locate`` gives the block index per letter.

    A dimension of size 1 is broadcast, one with an unknown letter is taken whole.
    """
    shape = tuple(1 if size == 1 else blocks.get(a, size) for a, size in zip(axes, x.shape, strict=True))

    def index(*grid_and_tables):
        at = locate(*grid_and_tables)
        return tuple(0 if size == 1 or a not in at else at[a] for a, size in zip(axes, x.shape, strict=True))

    return pl.BlockSpec(shape, index)


def rule_over(rule, shape):
    """The normaliser with its parameters spread over a shape."""
    return jax.tree.map(lambda ref: jnp.broadcast_to(ref[0, :1, :1], shape), rule)


def dot(a, b, contract: tuple[int, int], precision=None):
    """The product over these axes of a and b, in float32."""
    narrow = a.dtype != jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=None if narrow else precision,  # products of narrow numbers are exact as they are
        preferred_element_type=jnp.float32,
    )


def logits(static, inputs: Inputs, transposed: bool):
    """The logits of the tile before any mask, and the soft cap's tanh or None."""
    query, key = inputs.query[0, 0], inputs.key[0, 0]
    left, right = (key, query) if transposed else (query, key)
    s = dot(left, right, (1, 1), static.precision)
    if static.logit_factor != 1:
        s = s * static.logit_factor
    if inputs.bias is not None:
        s = s + inputs.bias[0, 0].astype(jnp.float32)
    if static.logits_soft_cap is None:
        return s, None
    capped = jnp.tanh(s / static.logits_soft_cap)
    return static.logits_soft_cap * capped, capped


def visible(static, inputs: Inputs, bounds: Bounds, b, i, j, transposed: bool):
    """Whether each query of tile i sees each key of tile j."""
    bq, bk = static.tiling.bq, static.tiling.bk
    shape = (bk, bq) if transposed else (bq, bk)
    query_axis = 1 if transposed else 0

    def of_batch(x):
        return None if x is None else x[0 if x.shape[0] == 1 else b]

    return visible_pairs(
        i * bq + jax.lax.broadcasted_iota(jnp.int32, shape, query_axis),
        j * bk + jax.lax.broadcasted_iota(jnp.int32, shape, 1 - query_axis),
        left=static.left,
        right=static.right,
        offset=of_batch(bounds.offset),
        query_limit=of_batch(bounds.query_limit),
        key_limit=of_batch(bounds.key_limit),
        query_ids=None if inputs.query_ids is None else inputs.query_ids[0],
        key_ids=None if inputs.key_ids is None else inputs.key_ids[0],
        mask=None
        if inputs.mask is None
        else jnp.broadcast_to(inputs.mask[0, 0].astype(jnp.int32), shape) != 0,
    )


def cleaned(x):
    """x with 0 for every NaN or inf, and along lanes (1, rows of x) NaN for every row that had one, else 0."""
    wide = x.astype(jnp.float32)
    broken = jnp.where(jnp.isfinite(wide), 0.0, 1.0)
    # A product with ones sums the rows and lays the sums along the lanes.
    count = dot(jnp.ones((8, broken.shape[1]), jnp.float32), broken, (1, 1))[:1]
    return finite_or_zero(wide).astype(x.dtype), jnp.where(count > 0, jnp.nan, 0.0)


def widen(x, width: int):
    """(rows, 128), the same in every lane, to (rows, width)."""
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def run(schedule, tables, b, outer, inner, step):
    """Runs ``step(masked)`` on the tile, where it is needed, masked only where some of its pairs are hidden."""
    needed, full = schedule.needed(tables, b, outer, inner), schedule.full(tables, b, outer, inner)
    if full is not False:
        pl.when(needed & full)(lambda: step(False))
    if full is not True:
        pl.when(needed & ~full if full is not False else needed)(lambda: step(True))


def spread(axes: Inputs, inputs: Inputs) -> Inputs:
    """The axes of every array in a tree of inputs: the rule and the row statistics are trees of their own."""
    return Inputs(
        *(
            None if x is None else jax.tree.map(lambda _, letters=letters: letters, x)
            for letters, x in zip(axes, inputs, strict=True)
        )
    )
