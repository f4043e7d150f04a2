"""The backward kernels. Tiles are recomputed from q, k and the row state, transposed: keys × queries."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnorm.kernels import tile
from attnorm.kernels.call import pallas_call
from attnorm.kernels.schedule import make_schedule
from attnorm.kernels.settings import LANES, SUBLANES


def tile_gradients(static, inputs: tile.Inputs, m, visible, is_tame=False):
    """Numerators, gradients of the logits, and of the parameters, all keys × queries; 0 where hidden.

    Where all inputs are tame, a hidden pair gives 0 by itself, since its numerator is 0.
    """
    s, capped = tile.logits(static, inputs, transposed=True)
    if visible is not None:
        s = jnp.where(visible, s, -jnp.inf)
    # Parameters are spread over the tile, so that the gradient of a hidden pair can be dropped.
    rule = tile.rule_over(inputs.rule, s.shape)
    (f, _), pull = jax.vjp(lambda s, rule: rule.terms(s, m), s, rule)
    df = tile.dot(inputs.value[0, 0], inputs.d_output[0, 0], (1, 1), static.precision)
    ds, d_rule = pull((df, tuple(jnp.broadcast_to(d[0, 0], s.shape) for d in inputs.d_stats)))
    if capped is not None:
        ds = ds * (1 - jnp.square(capped))
    if visible is not None and not is_tame:
        f, ds, d_rule = jax.tree.map(lambda x: jnp.where(visible, x, 0), (f, ds, d_rule))
    return f, ds, d_rule


def backward(static, inputs: tile.Inputs, visibility, bounds, dtypes):
    """dq (B, N, T, H), dk (B, K, S, H), dv (B, K, S, Hv) in these dtypes, and the parameters' (B, N, 8, 128).

    The gradient of all queries that share a key head stays in vector memory, so that nothing is computed twice.
    """
    tiling, G = static.tiling, static.G
    bq, bk, nq, nk = tiling.bq, tiling.bk, tiling.nq, tiling.nk
    B, N, T, H = inputs.query.shape
    _, K, S, Hv = inputs.value.shape
    schedule, tables = make_schedule(visibility, tiling, bounds, keys_outer=True)

    def locate(b, k, j, g, i, tables):
        return dict(b=b, n=k * G + g, k=k, q=schedule.fetch(tables, b, j, i), s=j)

    def spec(x, axes):
        return tile.block_spec(x, axes, dict(b=1, n=1, k=1, q=bq, s=bk), locate)

    def group_spec(x):
        return pl.BlockSpec((1, G, *x[2:]), lambda b, k, j, g, i, tables: (b, k, 0, 0))

    in_specs = jax.tree.map(spec, inputs, tile.spread(tile.TRANSPOSED_AXES, inputs))
    dq_dtype, dk_dtype, dv_dtype = dtypes
    dk, dv = jax.ShapeDtypeStruct((B, K, S, H), dk_dtype), jax.ShapeDtypeStruct((B, K, S, Hv), dv_dtype)
    parameter = (B, N, SUBLANES, LANES)
    num_parameters = len(jax.tree.leaves(inputs.rule))
    outputs = [
        ((B, N, T, H), dq_dtype, group_spec((B, N, T, H))),
        (dk.shape, dk.dtype, spec(dk, "bks_")),
        (dv.shape, dv.dtype, spec(dv, "bks_")),
        *((parameter, jnp.float32, group_spec(parameter)) for _ in range(num_parameters)),
    ]
    scratch = [
        pltpu.VMEM((G, T, H), jnp.float32),
        pltpu.VMEM((bk, H), jnp.float32),
        pltpu.VMEM((bk, Hv), jnp.float32),
        pltpu.SMEM((1,), jnp.int32),
        *(pltpu.VMEM((G, SUBLANES, LANES), jnp.float32) for _ in range(num_parameters)),
    ]

    def kernel(tables, refs, outputs, scratch):
        b, _, j, g, i = (pl.program_id(axis) for axis in range(5))
        dq_sum, dk_sum, dv_sum, keys_are_tame, *parameter_sums = scratch
        first_query, last_query = (g == 0) & (i == 0), (g == G - 1) & (i == nq - 1)

        @pl.when(first_query & (j == 0))
        def _():
            for ref in (dq_sum, *parameter_sums):
                ref[...] = jnp.zeros_like(ref)

        @pl.when(first_query)
        def _():
            dk_sum[...] = jnp.zeros_like(dk_sum)
            dv_sum[...] = jnp.zeros_like(dv_sum)
            is_tame = tile.is_tame(refs.key[0, 0], refs.value[0, 0])
            keys_are_tame[0] = is_tame.astype(jnp.int32)

        def add(refs, start, size, masked, is_tame):
            i_start = pl.multiple_of(i * bq + start, LANES)
            query, key, d_output, m = (x[0, 0] for x in (refs.query, refs.key, refs.d_output, refs.m))
            visible = None
            if masked:
                visible = tile.visible(
                    static, refs, tables.bounds, b, i_start, j * bk, (bk, size), transposed=True
                )
            if not is_tame:
                query, key = tile.finite(query), tile.finite(key)
                # A marked row of d_output spoils what it sees, and that alone, by way of f.
                m = m + tile.marked(d_output)
                d_output = tile.finite(d_output)
            f, ds, d_rule = tile_gradients(static, refs, m, visible, is_tame)
            dv_sum[...] += tile.dot(f.astype(d_output.dtype), d_output, (1, 0), static.precision)
            ds = ds.astype(query.dtype)
            dk_sum[...] += tile.dot(ds, query, (1, 0), static.precision)
            dq_sum[g, pl.ds(i_start, size), :] += tile.dot(ds, key, (0, 0), static.precision)
            for ref, x in zip(parameter_sums, jax.tree.leaves(d_rule), strict=True):
                ref[g] += _register_sum(x)

        def step(masked):
            if not masked:
                add(refs, 0, bq, masked=False, is_tame=True)
                return
            is_tame = (keys_are_tame[0] == 1) & tile.is_tame(refs.query[0, 0], refs.d_output[0, 0])
            is_tame &= tile.is_finite(refs.m[0, 0], *(ref[0, 0] for ref in refs.d_stats))
            pl.when(is_tame)(lambda: add(refs, 0, bq, masked=True, is_tame=True))

            def part(refs, start):
                add(refs, start, LANES, masked=True, is_tame=False)

            pl.when(~is_tame)(lambda: tile.in_parts(refs, tile.TRANSPOSED_AXES, bq, part))

        tile.run(schedule, tables, b, j, i, step)
        dq, dk, dv, *parameters = outputs

        @pl.when(last_query)
        def _():
            dk[0, 0] = (dk_sum[...] * static.logit_factor).astype(dk.dtype)
            dv[0, 0] = dv_sum[...].astype(dv.dtype)

        @pl.when(last_query & (j == nk - 1))
        def _():
            dq[0] = (dq_sum[...] * static.scale).astype(dq.dtype)
            for ref, x in zip(parameters, parameter_sums, strict=True):
                ref[0] = x[...]

    dq, dk, dv, *parameters = pallas_call(
        kernel,
        name="attnorm_backward",
        grid=(B, K, nk, G, nq),
        semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary"),
        tables=tables,
        inputs=inputs,
        in_specs=in_specs,
        outputs=outputs,
        scratch=scratch,
        static=static,
    )
    return dq, dk, dv, jax.tree.unflatten(jax.tree.structure(inputs.rule), parameters)


def bias_backward(static, inputs: tile.Inputs, visibility, bounds):
    """The gradient of the transposed bias, in float32, summed over the axes along which it is broadcast.

    A kernel of its own, because those axes must be the innermost of its grid. Unused, it is never run.
    """
    tiling = static.tiling
    bq, bk = tiling.bq, tiling.bk
    B, N, T, _ = inputs.query.shape
    S = inputs.key.shape[2]
    schedule, tables = make_schedule(visibility, tiling, bounds, keys_outer=True)
    bias = inputs.bias
    full = (B, N, S // bk, T // bq)
    summed = [axis for axis in range(4) if bias.shape[axis] == 1]
    order = [axis for axis in range(4) if axis not in summed] + summed
    place = {axis: order.index(axis) for axis in range(4)}

    def locate(*grid_and_tables):
        b, n, j, i = (grid_and_tables[place[axis]] for axis in range(4))
        return dict(b=b, n=n, k=jax.lax.div(n, static.G), q=i, s=j)

    def spec(x, axes):
        return tile.block_spec(x, axes, dict(b=1, n=1, k=1, q=bq, s=bk), locate)

    in_specs = jax.tree.map(spec, inputs, tile.spread(tile.TRANSPOSED_AXES, inputs))
    block = tuple(1 if bias.shape[axis] == 1 else size for axis, size in ((2, bk), (3, bq)))

    def kernel(tables, refs, d_bias, total):
        b, n, j, i = (pl.program_id(place[axis]) for axis in range(4))
        position = dict(enumerate((b, n, j, i)))
        first, last = True, True
        for axis in summed:
            first &= position[axis] == 0
            last &= position[axis] == full[axis] - 1

        @pl.when(first)
        def _():
            total[...] = jnp.zeros_like(total)

        def step(masked):
            visible = None
            if masked:
                visible = tile.visible(
                    static, refs, tables.bounds, b, i * bq, j * bk, (bk, bq), transposed=True
                )
            _, ds, _ = tile_gradients(static, refs, refs.m[0, 0], visible)
            axes = tuple(axis for axis, size in enumerate(block) if size == 1)
            total[...] += jnp.sum(ds, axis=axes, keepdims=True) if axes else ds

        tile.run(schedule, tables, b, j, i, step)

        @pl.when(last)
        def _():
            d_bias[0, 0] = total[...]

    return pallas_call(
        kernel,
        name="attnorm_bias_backward",
        grid=tuple(full[axis] for axis in order),
        semantics=("parallel",) * (4 - len(summed)) + ("arbitrary",) * len(summed),
        tables=tables,
        inputs=inputs,
        in_specs=in_specs,
        outputs=(bias.shape, jnp.float32, spec(bias, "bnsq")),
        scratch=pltpu.VMEM(block, jnp.float32),
        static=static,
    )


def _register_sum(x):
    """A tile summed to the size of one vector register, (8, 128)."""
    rows, lanes = x.shape
    x = jnp.sum(x.reshape(rows // SUBLANES, SUBLANES, lanes), axis=0)
    return sum(x[:, start : start + LANES] for start in range(0, lanes, LANES))
