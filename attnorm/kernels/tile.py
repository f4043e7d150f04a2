"""What forward and backward kernels do alike with one tile of the T × S matrix.

A tile is queries × keys in the forward pass, and transposed, keys × queries, in the backward pass: then the row
state of the queries lies along the lanes, and the products for dk and dv need no transpose.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.extend.core import Var

from attnorm.finite import finite_or_zero
from attnorm.kernels.schedule import Bounds
from attnorm.kernels.settings import LANES, SUBLANES
from attnorm.masks import visible_pairs

# Its square, times 8 and any head dim, is finite in float32.
_TAME = 2.0**50


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


def rule_tiles(normalizer, backward: bool) -> int:
    """How many tiles of numbers the scalar functions of a rule hold at once."""
    return _rule_tiles(jax.tree.structure(normalizer), backward)


@functools.cache
def _rule_tiles(structure, backward: bool) -> int:
    row, tile = (jax.ShapeDtypeStruct((rows, LANES), jnp.float32) for rows in (1, SUBLANES))

    def over_tile(tree):
        return jax.tree.map(lambda x: jnp.broadcast_to(x, tile.shape), tree)

    def terms(s, m, rule):
        return over_tile(rule).terms(s, m)

    def gradients(s, m, rule, df, d_stats):
        (f, _), pull = jax.vjp(lambda s, rule: rule.terms(s, m), s, over_tile(rule))
        return f, pull((df, over_tile(d_stats)))

    arguments = tile, row, jax.tree.unflatten(structure, [row] * structure.num_leaves)
    if not backward:
        return _most_alive(jax.make_jaxpr(terms)(*arguments).jaxpr, tile.shape)
    _, d_stats = jax.tree.map(lambda _: row, jax.eval_shape(terms, *arguments))
    return _most_alive(jax.make_jaxpr(gradients)(*arguments, tile, d_stats).jaxpr, tile.shape)


def _most_alive(jaxpr, shape) -> int:
    """The largest number of values of this shape that a program holds at once; broadcasts are not held."""
    last_use = {x: len(jaxpr.eqns) for x in jaxpr.outvars if isinstance(x, Var)}
    for step, equation in reversed(list(enumerate(jaxpr.eqns))):
        for x in equation.invars:
            if isinstance(x, Var):
                last_use.setdefault(x, step)
    made = [(x, -1) for x in jaxpr.invars] + [
        (x, step)
        for step, equation in enumerate(jaxpr.eqns)
        if equation.primitive.name != "broadcast_in_dim"
        for x in equation.outvars
    ]
    spans = [(step, last_use.get(x, step)) for x, step in made if x.aval.shape == shape]
    return max(sum(start < step <= stop for start, stop in spans) for step in range(len(jaxpr.eqns) + 1))


def dot(a, b, contract: tuple[int, int], precision=jax.lax.Precision.DEFAULT):
    """The product over these axes of a and b, in float32."""
    narrow = a.dtype != jnp.float32
    return jax.lax.dot_general(
        a,
        b,
        (((contract[0],), (contract[1],)), ((), ())),
        # Products of narrow numbers are exact as they are, whatever the default precision is around the call.
        precision=jax.lax.Precision.DEFAULT if narrow else precision,
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


def visible(static, inputs: Inputs, bounds: Bounds, b, i_start, j_start, shape, transposed: bool):
    """Whether each query of a tile that starts at (i_start, j_start) sees each key."""
    query_axis = 1 if transposed else 0

    def of_batch(x, shift):
        return None if x is None else x[0 if x.shape[0] == 1 else b] + shift

    # Counted from the tile's corner: what is added to a scalar need not be added to every pair.
    return visible_pairs(
        i_start + jax.lax.broadcasted_iota(jnp.int32, shape, query_axis),
        j_start + jax.lax.broadcasted_iota(jnp.int32, shape, 1 - query_axis),
        left=static.left,
        right=static.right,
        offset=of_batch(bounds.offset, 0),
        query_limit=of_batch(bounds.query_limit, 0),
        key_limit=of_batch(bounds.key_limit, 0),
        query_ids=None if inputs.query_ids is None else inputs.query_ids[0],
        key_ids=None if inputs.key_ids is None else inputs.key_ids[0],
        mask=None
        if inputs.mask is None
        else jnp.broadcast_to(inputs.mask[0, 0].astype(jnp.int32), shape) != 0,
    )


def is_tame(*matrices):
    """Whether all numbers are finite, and so small that no product of two rows overflows."""
    # Products with ones sum the columns: the matrix unit is idle here, the vector unit is not.
    sums = (dot(jnp.ones((SUBLANES, x.shape[0]), x.dtype), jnp.abs(x), (1, 0)) for x in matrices)
    return sum(jnp.sum(x) for x in sums) < _TAME  # false for NaN


def is_finite(*rows):
    """Whether all numbers are finite."""
    return sum(jnp.sum(jnp.where(jnp.isfinite(x), jnp.float32(0), 1)) for x in rows) == 0


def finite(x):
    """x with 0 for every NaN or inf."""
    return finite_or_zero(x.astype(jnp.float32)).astype(x.dtype)


def marked(x):
    """NaN for every row of x that has a NaN or inf, else 0; along lanes, (1, rows)."""
    broken = jnp.where(jnp.isfinite(x.astype(jnp.float32)), jnp.float32(0), 1)
    # A product with ones sums the rows and lays the sums along the lanes.
    count = dot(jnp.ones((SUBLANES, broken.shape[1]), jnp.float32), broken, (1, 1))[:1]
    return jnp.where(count > 0, jnp.float32(jnp.nan), 0)


def widen(x, width: int):
    """(rows, 128), the same in every lane, to (rows, width)."""
    return x if width == LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def along_lanes(x):
    """(rows, 128), the same in every lane, to (1, rows)."""
    lane = jax.lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 1)
    on_diagonal = jax.lax.rem(lane, SUBLANES) == jax.lax.broadcasted_iota(jnp.int32, lane.shape, 0)
    rows = []
    for start in range(0, x.shape[0], LANES):
        # Of each register the lanes in which its rows belong, and in each of these the one row.
        picked = x[start : start + SUBLANES]
        for first in range(SUBLANES, LANES, SUBLANES):
            register = x[start + first : start + first + SUBLANES]
            picked = jnp.where(lane >= first, register, picked)
        rows.append(jnp.sum(jnp.where(on_diagonal, picked, 0), axis=0, keepdims=True))
    return jnp.concatenate(rows, axis=1)


def run(schedule, tables, b, outer, inner, step):
    """Runs ``step(masked)`` on the tile, where it is needed; returns whether some of its pairs are hidden."""
    needed, full = schedule.needed(tables, b, outer, inner), schedule.full(tables, b, outer, inner)
    if full is not False:
        pl.when(needed & full)(lambda: step(False))
    if full is True:
        return False
    masked = needed if full is False else needed & ~full
    pl.when(masked)(lambda: step(True))
    return masked


def spread(axes: Inputs, inputs: Inputs) -> Inputs:
    """The axes of every array in a tree of inputs: the rule and the row statistics are trees of their own."""
    return type(inputs)(
        *(
            None if x is None else jax.tree.map(lambda _, letters=letters: letters, x)
            for letters, x in zip(axes, inputs, strict=True)
        )
    )


def some_queries(inputs: Inputs, axes: Inputs, queries) -> Inputs:
    """The references of a kernel, cut to these queries of the tile."""

    def cut(ref, letters):
        axis = letters.find("q")
        if axis == -1 or ref.shape[axis] == 1:
            return ref
        return ref.at[tuple(queries if a == axis else slice(None) for a in range(len(letters)))]

    return jax.tree.map(cut, inputs, spread(axes, inputs))


def in_parts(refs: Inputs, axes: Inputs, size: int, step):
    """Runs ``step(some, start)`` on the tile by parts of 128 queries: slower, and little code."""

    @pl.loop(0, size // LANES)
    def _(part):
        start = pl.multiple_of(part * LANES, LANES)
        step(some_queries(refs, axes, pl.ds(start, LANES)), start)
