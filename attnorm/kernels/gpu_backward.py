"""The backward kernels on Hopper: dq by tiles of queries, dk and dv by tiles of keys.

Both recompute a tile's logits, and take the slopes of the rule's scalar functions by automatic differentiation.
Nothing is summed over thread blocks, so results do not depend on the order in which these run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attnorm.kernels import gpu_tile as tile
from attnorm.kernels.gpu_call import kernel_call
from attnorm.kernels.gpu_forward import steps
from attnorm.kernels.gpu_rule import translated
from attnorm.kernels.schedule import Schedule
from attnorm.kernels.slopes import recompute


def query_gradient(static, inputs: tile.Inputs, schedule: Schedule, tiling):
    """dq (B, T, N, H), and the parameters' gradients by rows: a rule of (B, N, T), padded to whole tiles."""
    B, T, N, H = inputs.query.shape
    Hv = inputs.value.shape[-1]
    dtype = inputs.query.dtype
    bk = tiling.bk
    groups = tiling.bq // tile.ROWS
    parameters, rule_tree = jax.tree.flatten(inputs.rule)

    def kernel(inputs, outputs, scratch):
        dq_out, *d_rule_out = outputs
        queries, d_outputs, arrived = scratch
        batch, head = jax.lax.axis_index("batch"), jax.lax.axis_index("head")
        outer, group = tiling.nq - 1 - jax.lax.axis_index("tile"), jax.lax.axis_index("group")
        key_head = jax.lax.div(head, jnp.int32(static.G))
        i = outer * tiling.bq + group * tile.ROWS
        start, stop = schedule.span(inputs.tables, batch, outer)

        def compute(pipeline):
            here = (batch, pl.ds(i, tile.ROWS), head)
            plgpu.copy_gmem_to_smem(inputs.query.at[here], queries.at[group], arrived.at[group])
            plgpu.copy_gmem_to_smem(inputs.d_output.at[here], d_outputs.at[group], arrived.at[group])
            state = tuple(
                tile.rows(inputs.rows.at[batch, head, r], i, tile.ROWS) for r in range(inputs.rows.shape[2])
            )
            plgpu.barrier_wait(arrived.at[group])
            vector = plgpu.layout_cast(jnp.zeros(tile.ROWS, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            dq, d_rule, _ = pipeline((tile.zeros(tile.ROWS, H), (vector,) * len(parameters), state))
            queries.at[group][...] = (dq * static.scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(queries.at[group], dq_out.at[here])
            for out, x in zip(d_rule_out, d_rule, strict=True):
                plgpu.store(out.at[batch, head, pl.ds(i, tile.ROWS)], x, optimized=False)
            plgpu.wait_smem_to_gmem(0)

        def step(indices, key, value, key_done, value_done, carry):
            dq, d_rule, state = carry
            inner = start + indices[0]
            place = tile.Place(batch, head, i, inner * bk, (tile.ROWS, bk), transposed=False)
            is_full = schedule.full(inputs.tables, batch, outer, inner)
            m, g, *d_stats = (tile.over_rows(x, place.shape) for x in state)
            # The products first: no slopes need to outlive one in registers.
            s = tile.product(queries.at[group], key.transpose((1, 0)), place.shape)
            dp = tile.product(d_outputs.at[group], value.transpose((1, 0)), place.shape)
            plgpu.barrier_arrive(value_done)
            s, capped = tile.logits(static, inputs, place, is_full, s)
            rule = tile.rule_over(inputs.rule, head, place.shape)
            _, back = recompute(rule, s, capped, m, translated)
            ds, d_spread = back(g * dp, d_stats)
            d_rule = tuple(total + jnp.sum(x, axis=1) for total, x in zip(d_rule, d_spread, strict=True))
            dq = tile.add_product(static, dq, ds.astype(dtype), key)
            plgpu.barrier_arrive(key_done)
            return dq, d_rule, state

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(steps(start, stop),),
            max_concurrent_steps=2,
            num_compute_wgs=groups,
            memory_registers=tile.MEMORY_REGISTERS,
            wg_axis="group",
            manual_consumed_barriers=True,
            compute_context=compute,
            in_specs=[tile.block((bk, width), lambda j: (start + j, 0)) for width in (H, Hv)],
        )(inputs.key.at[batch, :, key_head], inputs.value.at[batch, :, key_head])

    rows = jax.ShapeDtypeStruct((B, N, tiling.nq * tiling.bq), jnp.float32)
    dq, *d_rule = kernel_call(
        kernel,
        name="attnorm_gpu_backward_query",
        grid=dict(head=N, tile=tiling.nq, batch=B),
        groups=groups,
        inputs=inputs,
        outputs=[jax.ShapeDtypeStruct((B, T, N, H), dtype), *[rows] * len(parameters)],
        scratch=[
            tile.matrix(groups, tile.ROWS, H, dtype=dtype),
            tile.matrix(groups, tile.ROWS, Hv, dtype=dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=groups),
        ],
        static=static,
    )
    return dq, jax.tree.unflatten(rule_tree, d_rule)


def key_gradients(static, inputs: tile.Inputs, schedule: Schedule, tiling, names: tuple[str, ...]):
    """Those of dk (B, S, K, H) and dv (B, S, K, Hv) that are named, "key" or "value". Tiles are transposed."""
    B, S, K, H = inputs.key.shape
    Hv = inputs.value.shape[-1]
    dtype = inputs.query.dtype
    bq = tiling.bq
    groups = tiling.bk // tile.ROWS
    num_rows = inputs.rows.shape[2]
    widths = {"key": H, "value": Hv}

    def kernel(inputs, outputs, scratch):
        keys, values, arrived = scratch
        own = {"key": keys, "value": values}
        batch, key_head = jax.lax.axis_index("batch"), jax.lax.axis_index("head")
        outer, group = jax.lax.axis_index("tile"), jax.lax.axis_index("group")
        j = outer * tiling.bk + group * tile.ROWS
        start, stop = schedule.span(inputs.tables, batch, outer)
        first_head = key_head * static.G

        def compute(pipeline):
            here = (batch, pl.ds(j, tile.ROWS), key_head)
            plgpu.copy_gmem_to_smem(inputs.key.at[here], keys.at[group], arrived.at[group])
            plgpu.copy_gmem_to_smem(inputs.value.at[here], values.at[group], arrived.at[group])
            plgpu.barrier_wait(arrived.at[group])
            totals = pipeline({name: tile.zeros(tile.ROWS, widths[name]) for name in names})
            for name, out in zip(names, outputs, strict=True):
                factor = static.scale if name == "key" else 1
                own[name].at[group][...] = (totals[name] * factor).astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(own[name].at[group], out.at[here])
            plgpu.wait_smem_to_gmem(0)

        def step(indices, query, d_output, state, query_done, d_output_done, state_done, totals):
            inner = start + indices[1]
            shape = (tile.ROWS, bq)
            place = tile.Place(batch, first_head + indices[0], inner * bq, j, shape, transposed=True)
            is_full = schedule.full(inputs.tables, batch, outer, inner)

            def of_row(r):
                return tile.over(state.at[r], 0, 1, shape)

            # One gradient after the other, to need fewer registers.
            s = tile.product(keys.at[group], query.transpose((1, 0)), shape)
            s, capped = tile.logits(static, inputs, place, is_full, s)
            rule = tile.rule_over(inputs.rule, place.head, shape)
            f, back = recompute(rule, s, capped, of_row(0), translated)
            if "value" in totals:
                weights = (of_row(1) * f).astype(dtype)
                totals |= {"value": tile.add_product(static, totals["value"], weights, d_output)}
            if "key" in totals:
                dp = tile.product(values.at[group], d_output.transpose((1, 0)), shape)
                ds, _ = back(of_row(1) * dp, [of_row(r) for r in range(2, num_rows)])
                totals |= {"key": tile.add_product(static, totals["key"], ds.astype(dtype), query)}
            for done in (state_done, d_output_done, query_done):
                plgpu.barrier_arrive(done)
            return totals

        def of_query(width):
            return tile.block((bq, None, width), lambda g, i: (start + i, first_head + g, 0))

        plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(static.G, steps(start, stop)),
            max_concurrent_steps=2,
            num_compute_wgs=groups,
            memory_registers=tile.MEMORY_REGISTERS,
            wg_axis="group",
            manual_consumed_barriers=True,
            compute_context=compute,
            in_specs=[
                of_query(H),
                of_query(Hv),
                plgpu.BlockSpec((None, num_rows, bq), lambda g, i: (first_head + g, 0, start + i)),
            ],
        )(inputs.query.at[batch], inputs.d_output.at[batch], inputs.rows.at[batch])

    return kernel_call(
        kernel,
        name="attnorm_gpu_backward_" + "_and_".join(names),
        grid=dict(head=K, tile=tiling.nk, batch=B),
        groups=groups,
        inputs=inputs,
        outputs=[jax.ShapeDtypeStruct((B, S, K, widths[name]), dtype) for name in names],
        scratch=[
            tile.matrix(groups, tile.ROWS, H, dtype=dtype),
            tile.matrix(groups, tile.ROWS, Hv, dtype=dtype),
            plgpu.Barrier(num_arrivals=2, num_barriers=groups),
        ],
        static=static,
    )
