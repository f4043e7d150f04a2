"""The portable forward kernel: output and row state of one tile of queries over all tiles of keys."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attnorm.kernels import triton_tile as tile
from attnorm.kernels.schedule import Schedule
from attnorm.kernels.tile import dot
from attnorm.kernels.triton_call import kernel_call
from attnorm.rows import num_statistics


def forward(static, inputs: tile.Inputs, schedule: Schedule, tiling):
    """The output (B, T, N, Hv), and the row state: m and statistics (B, N, T)."""
    B, T, N, _ = inputs.query.shape
    Hv = inputs.value.shape[-1]
    dtype = inputs.query.dtype
    bq, bk = tiling.bq, tiling.bk
    num_stats = num_statistics(inputs.rule)

    def outer(program):
        return tiling.nq - 1 - program  # the last first: under a causal mask they have the most to do

    def locate(i, n, b):
        return dict(b=b, n=n, k=n if static.G == 1 else jax.lax.div(n, static.G), q=outer(i))

    def kernel(refs, outputs):
        output, m_out, *stats_out = outputs
        i, batch = outer(pl.program_id(0)), pl.program_id(2)
        rule_over = functools.partial(tile.rule_over, refs.rule, 0)
        uses_max = refs.rule.uses_max
        query = refs.query[0, :, 0]

        def step(j, carry):
            accumulator, m_old, stats = carry
            place = tile.Place(batch, 0, i * bq, j * bk, (bq, bk), transposed=False)
            key, value = (ref[0, place.columns, 0] for ref in (refs.key, refs.value))
            s = dot(query, key, (1, 1), static.precision)
            s, _ = tile.logits(static, refs, place, schedule.full(refs.tables, batch, i, j), s)
            m = jnp.maximum(m_old, jnp.max(s, axis=1)) if uses_max else m_old
            f, terms = rule_over(s.shape).terms(s, m[:, None])
            if uses_max:
                factor, factors = rule_over(m.shape).rescale(m_old, m)
                accumulator = accumulator * factor[:, None]
                stats = tuple(h * r for h, r in zip(stats, factors, strict=True))
            else:  # such as a rectifier, for which a GPU's maximum of 0 and NaN is 0
                f = jnp.where(s == s, f, jnp.nan)
            stats = tuple(h + jnp.sum(more, axis=1) for h, more in zip(stats, terms, strict=True))
            f = tile.at_visible(static, refs, place, s, tile.with_value_marks(refs, place, f))
            accumulator = accumulator + dot(f.astype(dtype), value, (1, 0), static.precision)
            return accumulator, m, stats

        rule = rule_over((bq,))
        m = rule.start(float(jnp.finfo(jnp.float32).min))
        row = jnp.zeros(bq, jnp.float32)
        carry = (jnp.zeros((bq, Hv), jnp.float32), row + m, (row,) * num_stats)
        accumulator, m, stats = jax.lax.fori_loop(*schedule.span(refs.tables, batch, i), step, carry)
        output[0, :, 0] = (accumulator * rule.finalize(stats, m)[:, None]).astype(dtype)
        for out, x in zip((m_out, *stats_out), (m, *stats), strict=True):
            out[0, 0] = x

    rows = ((B, N, T), jnp.float32, "bnq")
    return kernel_call(
        kernel,
        name="attnorm_triton_forward",
        grid=(tiling.nq, N, B),
        inputs=inputs,
        axes=tile.AXES,
        blocks=dict(b=1, n=1, k=1, q=bq),
        locate=locate,
        outputs=[((B, T, N, Hv), dtype, "bqn_"), *[rows] * (1 + num_stats)],
        static=static,
    )
