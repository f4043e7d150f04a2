"""The forward kernel on Hopper: output and row state of 128 queries over all tiles of keys.

A thread block has three warpgroups. One moves tiles of keys and values into shared memory, ahead of time; each of
the others owns 64 queries, and they take turns at the matrix unit, so that one multiplies while the other
exponentiates.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from attnorm.kernels import gpu_tile as tile
from attnorm.kernels.gpu_call import kernel_call
from attnorm.kernels.gpu_rule import translated
from attnorm.kernels.schedule import Schedule
from attnorm.rows import num_statistics


def forward(static, inputs: tile.Inputs, schedule: Schedule, tiling):
    """The output (B, T, N, Hv), and the row state: m and statistics (B, N, T), padded to whole tiles."""
    B, T, N, H = inputs.query.shape
    Hv = inputs.value.shape[-1]
    dtype = inputs.query.dtype
    bk = tiling.bk
    groups = tiling.bq // tile.ROWS
    num_stats = num_statistics(inputs.rule)
    shares_memory = H == Hv

    def kernel(inputs, outputs, scratch):
        output, m_out, *stats_out = outputs
        queries, results, arrived, turn = scratch
        batch, head = jax.lax.axis_index("batch"), jax.lax.axis_index("head")
        # The last tiles first: under a causal mask they have the most to do.
        outer = tiling.nq - 1 - jax.lax.axis_index("tile")
        group = jax.lax.axis_index("group")
        key_head = jax.lax.div(head, jnp.int32(static.G))
        i = outer * tiling.bq + group * tile.ROWS
        start, stop = schedule.span(inputs.tables, batch, outer)

        def rule(shape):
            return tile.rule_over(inputs.rule, head, shape)

        def take_turns():
            if groups == 2:
                plgpu.barrier_arrive(turn)
                plgpu.barrier_wait(turn)

        def compute(pipeline):
            own = queries.at[group]
            here = (batch, pl.ds(i, tile.ROWS), head)
            plgpu.copy_gmem_to_smem(inputs.query.at[here], own, arrived.at[group])
            plgpu.barrier_wait(arrived.at[group])
            floor = float(jnp.finfo(jnp.float32).min)
            vector = plgpu.layout_cast(jnp.zeros(tile.ROWS, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            m = translated(lambda rule: rule.start(floor))(rule(vector.shape))
            m = jnp.broadcast_to(jnp.asarray(m, jnp.float32), vector.shape)
            m = plgpu.layout_cast(m, plgpu.Layout.WGMMA.reduce(1))
            pl.when(group == 1)(take_turns)
            accumulator, m, stats = pipeline((tile.zeros(tile.ROWS, Hv), m, (vector,) * num_stats))
            pl.when(group == 0)(take_turns)

            g = translated(rule(m.shape).finalize)(stats, m)
            result = (queries if shares_memory else results).at[group]
            result[...] = (accumulator * tile.over_rows(g, accumulator.shape)).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(result, output.at[here])
            for out, x in zip((m_out, *stats_out), (m, *stats), strict=True):
                plgpu.store(out.at[batch, head, pl.ds(i, tile.ROWS)], x, optimized=False)
            plgpu.wait_smem_to_gmem(0)

        def step(indices, key, value, key_done, value_done, carry):
            accumulator, m_old, stats = carry
            inner = start + indices[0]
            place = tile.Place(batch, head, i, inner * bk, (tile.ROWS, bk), transposed=False)
            is_full = schedule.full(inputs.tables, batch, outer, inner)  # early, for it reads global memory

            def multiply(accumulator):
                plgpu.wgmma(accumulator, queries.at[group], key.transpose((1, 0)))
                take_turns()
                return accumulator[...]

            s = pl.run_scoped(multiply, plgpu.ACC(place.shape, jnp.float32))
            plgpu.barrier_arrive(key_done)
            s, _ = tile.logits(static, inputs, place, is_full, s)
            m = jnp.maximum(m_old, jnp.max(s, axis=1)) if inputs.rule.uses_max else m_old
            f, terms = translated(rule(s.shape).terms)(s, tile.over_rows(m, s.shape))
            terms = [jnp.sum(h, axis=1) for h in terms]
            if inputs.rule.uses_max:
                factor, factors = translated(rule(m.shape).rescale)(m_old, m)
                stats = [h * r for h, r in zip(stats, factors, strict=True)]
                accumulator = accumulator * tile.over_rows(factor, accumulator.shape)
            else:  # such as a rectifier, for which the hardware's maximum of 0 and NaN may be 0
                f = jnp.where(s == s, f, jnp.nan)
            stats = tuple(a + b for a, b in zip(stats, terms, strict=True))
            f = f.astype(dtype)
            take_turns()
            accumulator = tile.add_product(static, accumulator, f, value)
            plgpu.barrier_arrive(value_done)
            return accumulator, m, stats

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
    return kernel_call(
        kernel,
        name="attnorm_gpu_forward",
        grid=dict(head=N, tile=tiling.nq, batch=B),
        groups=groups,
        inputs=inputs,
        outputs=[jax.ShapeDtypeStruct((B, T, N, Hv), dtype), *[rows] * (1 + num_stats)],
        scratch=[
            tile.matrix(groups, tile.ROWS, H, dtype=dtype),
            None if shares_memory else tile.matrix(groups, tile.ROWS, Hv, dtype=dtype),
            plgpu.Barrier(num_barriers=groups),
            plgpu.Barrier(num_arrivals=groups),
        ],
        static=static,
    )


def steps(start, stop):
    """The number of tiles from start to stop; a Python int where that is known now."""
    if isinstance(start, int) and isinstance(stop, int):
        return stop - start
    return jnp.maximum(stop - start, 0)
