"""The forward kernel: output and row state of one tile of queries over all tiles of keys."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnorm.kernels import tile
from attnorm.kernels.call import pallas_call
from attnorm.kernels.schedule import make_schedule
from attnorm.kernels.settings import LANES
from attnorm.rows import num_statistics

# Queries of a tile that go through the units of the chip together.
_PART = 512


def forward(static, inputs: tile.Inputs, visibility, bounds):
    """The output (B, N, T, Hv), and the row state: m and statistics (B, N, 1, T). All padded.

    Of a partial result, the accumulator in float32 instead of the output.
    """
    tiling = static.tiling
    bq, bk = tiling.bq, tiling.bk
    B, N, T, _ = inputs.query.shape
    Hv = inputs.value.shape[-1]
    schedule, tables = make_schedule(visibility, tiling, bounds, keys_outer=False)
    num_stats = num_statistics(inputs.rule)

    def locate(b, n, i, j, tables):
        key_head = n if static.G == 1 else jax.lax.div(n, static.G)
        return dict(b=b, n=n, k=key_head, q=i, s=schedule.fetch(tables, b, i, j))

    def spec(x, axes):
        return tile.block_spec(x, axes, dict(b=1, n=1, k=1, q=bq, s=bk), locate)

    in_specs = jax.tree.map(spec, inputs, tile.spread(tile.AXES, inputs))
    row = jax.ShapeDtypeStruct((B, N, 1, T), jnp.float32)
    output = jax.ShapeDtypeStruct((B, N, T, Hv), jnp.float32 if static.is_partial else inputs.query.dtype)
    outputs = [
        (x.shape, x.dtype, spec(x, axes))
        for x, axes in ((output, "bnq_"), *((row, "bn_q") for _ in range(1 + num_stats)))
    ]
    rows = pltpu.VMEM((bq, LANES), jnp.float32)

    def kernel(tables, refs, outputs, scratch):
        b, _, i, j = (pl.program_id(axis) for axis in range(4))
        accumulator, m_ref, *stats_refs = scratch

        def rule(shape):
            return tile.rule_over(refs.rule, shape)

        @pl.when(j == 0)
        def _():
            accumulator[...] = jnp.zeros_like(accumulator)
            floor = float(jnp.finfo(jnp.float32).min)
            m_ref[...] = jnp.broadcast_to(jnp.float32(rule(m_ref.shape).start(floor)), m_ref.shape)
            for ref in stats_refs:
                ref[...] = jnp.zeros_like(ref)

        def add(refs, start, size, masked, is_tame):
            rows = pl.ds(start, size)
            s, _ = tile.logits(static, refs, transposed=False)
            value = refs.value[0, 0]
            if masked:
                i_start = i * bq + start
                visible = tile.visible(
                    static, refs, tables.bounds, b, i_start, j * bk, (size, bk), transposed=False
                )
                s = jnp.where(visible, s, -jnp.inf)
            m_old = m_ref[rows]
            m = rule(m_old.shape).next_reference(m_old, s, axis=1)
            f, terms = rule(s.shape).terms(s, tile.widen(m, bk))
            factor, factors = rule(m.shape).rescale(m_old, m)
            for ref, r, h in zip(stats_refs, factors, terms, strict=True):
                ref[rows] = ref[rows] * r + jnp.sum(h, axis=1, keepdims=True)
            if not is_tame:
                f = jnp.where(visible, f + tile.marked(value), 0)
                value = tile.finite(value)
            product = tile.dot(f.astype(value.dtype), value, (1, 0), static.precision)
            accumulator[rows] = accumulator[rows] * tile.widen(factor, Hv) + product
            m_ref[rows] = m

        def add_tame(masked):
            # Parts depend on nothing of each other: one is in the matrix unit while another is in the vector unit.
            for start in range(0, bq, _PART):
                size = min(_PART, bq - start)
                some = tile.some_queries(refs, tile.AXES, pl.ds(start, size))
                add(some, start, size, masked, is_tame=True)

        def step(masked):
            if not masked:
                add_tame(masked=False)
                return
            is_tame = tile.is_tame(refs.value[0, 0])
            pl.when(is_tame)(lambda: add_tame(masked=True))

            def part(refs, start):
                add(refs, start, LANES, masked=True, is_tame=False)

            pl.when(~is_tame)(lambda: tile.in_parts(refs, tile.AXES, bq, part))

        tile.run(schedule, tables, b, i, j, step)

        @pl.when(j == tiling.nk - 1)
        def _():
            output, *rows = outputs
            stats = tuple(ref[...] for ref in stats_refs)
            result = accumulator[...]
            if not static.is_partial:
                result *= tile.widen(rule(m_ref.shape).finalize(stats, m_ref[...]), Hv)
            output[0, 0] = result.astype(output.dtype)
            for row, x in zip(rows, (m_ref[...], *stats), strict=True):
                row[0, 0] = tile.along_lanes(x)

    output, m, *stats = pallas_call(
        kernel,
        name="attnorm_forward",
        grid=(B, N, tiling.nq, tiling.nk),
        semantics=("parallel", "parallel", "parallel", "arbitrary"),
        tables=tables,
        inputs=inputs,
        in_specs=in_specs,
        outputs=outputs,
        scratch=[
            pltpu.VMEM((bq, Hv), jnp.float32),
            rows,
            *(rows for _ in range(num_stats)),
        ],
        static=static,
    )
    return output, m, tuple(stats)
