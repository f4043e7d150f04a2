"""The portable backward kernels: dq by tiles of queries, dk and dv by tiles of keys.

Both recompute a tile's logits, and take the slopes of the rule's scalar functions by automatic differentiation.
Nothing is summed over programs, so results do not depend on the order in which these run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attnorm.kernels import triton_tile as tile
from attnorm.kernels.schedule import Schedule
from attnorm.kernels.slopes import recompute
from attnorm.kernels.tile import dot
from attnorm.kernels.triton_call import kernel_call


def query_gradient(static, inputs: tile.Inputs, schedule: Schedule, tiling):
    """dq (B, T, N, H), and the parameters' gradients by rows: a rule of (B, N, T)."""
    B, T, N, H = inputs.query.shape
    dtype = inputs.query.dtype
    bq, bk = tiling.bq, tiling.bk
    num_rows = inputs.rows.shape[2]
    parameters, rule_tree = jax.tree.flatten(inputs.rule)

    def outer(program):
        return tiling.nq - 1 - program

    def locate(i, n, b):
        return dict(b=b, n=n, k=n if static.G == 1 else jax.lax.div(n, static.G), q=outer(i))

    def kernel(refs, outputs):
        dq_out, *d_rule_out = outputs
        i, batch = outer(pl.program_id(0)), pl.program_id(2)
        query, d_output = refs.query[0, :, 0], refs.d_output[0, :, 0]
        m, g, *d_stats = (refs.rows[0, 0, r][:, None] for r in range(num_rows))

        def step(j, carry):
            dq, d_rule = carry
            place = tile.Place(batch, 0, i * bq, j * bk, (bq, bk), transposed=False)
            key, value = (ref[0, place.columns, 0] for ref in (refs.key, refs.value))
            s = dot(query, key, (1, 1), static.precision)
            s, capped = tile.logits(static, refs, place, schedule.full(refs.tables, batch, i, j), s)
            _, back = recompute(tile.rule_over(refs.rule, 0, s.shape), s, capped, m)
            dp = tile.with_value_marks(refs, place, dot(d_output, value, (1, 1), static.precision))
            ds, d_spread = back(g * dp, d_stats)
            ds, *d_spread = (tile.at_visible(static, refs, place, s, x) for x in (ds, *d_spread))
            d_rule = tuple(total + jnp.sum(x, axis=1) for total, x in zip(d_rule, d_spread, strict=True))
            return dq + dot(ds.astype(dtype), key, (1, 0), static.precision), d_rule

        row = jnp.zeros(bq, jnp.float32)
        carry = (jnp.zeros((bq, H), jnp.float32), (row,) * len(parameters))
        dq, d_rule = jax.lax.fori_loop(*schedule.span(refs.tables, batch, i), step, carry)
        dq_out[0, :, 0] = (dq * static.scale).astype(dtype)
        for out, x in zip(d_rule_out, d_rule, strict=True):
            out[0, 0] = x

    rows = ((B, N, T), jnp.float32, "bnq")
    dq, *d_rule = kernel_call(
        kernel,
        name="attnorm_triton_backward_query",
        grid=(tiling.nq, N, B),
        inputs=inputs,
        axes=tile.AXES,
        blocks=dict(b=1, n=1, k=1, q=bq),
        locate=locate,
        outputs=[((B, T, N, H), dtype, "bqn_"), *[rows] * len(parameters)],
        static=static,
    )
    return dq, jax.tree.unflatten(rule_tree, d_rule)


def key_gradients(static, inputs: tile.Inputs, schedule: Schedule, tiling):
    """dk (B, S, K, H) and dv (B, S, K, Hv). Tiles are transposed."""
    B, S, K, H = inputs.key.shape
    Hv = inputs.value.shape[-1]
    dtype = inputs.query.dtype
    bq, bk, G = tiling.bq, tiling.bk, static.G
    num_rows = inputs.rows.shape[2]

    def locate(j, k, b):
        return dict(b=b, n=k, k=k, s=j)

    def kernel(refs, outputs):
        dk_out, dv_out = outputs
        j, batch = pl.program_id(0), pl.program_id(2)
        key, value = refs.key[0, :, 0], refs.value[0, :, 0]

        def of_head(head, carry):
            def step(i, carry):
                dk, dv = carry
                place = tile.Place(batch, head, j * bk, i * bq, (bk, bq), transposed=True)
                query, d_output = (ref[0, place.columns, head] for ref in (refs.query, refs.d_output))
                m, g, *d_stats = (tile.of_queries(refs.rows, place, 0, head, r) for r in range(num_rows))
                s = dot(key, query, (1, 1), static.precision)
                s, capped = tile.logits(static, refs, place, schedule.full(refs.tables, batch, j, i), s)
                f, back = recompute(tile.rule_over(refs.rule, head, s.shape), s, capped, m)
                weights = tile.at_visible(static, refs, place, s, g * f).astype(dtype)
                dv = dv + dot(weights, d_output, (1, 0), static.precision)
                dp = tile.with_value_marks(refs, place, dot(value, d_output, (1, 1), static.precision))
                ds, _ = back(g * dp, d_stats)
                ds = tile.at_visible(static, refs, place, s, ds).astype(dtype)
                return dk + dot(ds, query, (1, 0), static.precision), dv

            return jax.lax.fori_loop(*schedule.span(refs.tables, batch, j), step, carry)

        zeros = jnp.zeros((bk, H), jnp.float32), jnp.zeros((bk, Hv), jnp.float32)
        dk, dv = of_head(0, zeros) if G == 1 else jax.lax.fori_loop(0, G, of_head, zeros)
        dk_out[0, :, 0] = (dk * static.scale).astype(dtype)
        dv_out[0, :, 0] = dv.astype(dtype)

    return kernel_call(
        kernel,
        name="attnorm_triton_backward_key",
        grid=(tiling.nk, K, B),
        inputs=inputs,
        axes=tile.TRANSPOSED_AXES,
        blocks=dict(b=1, n=G, k=1, s=bk),
        locate=locate,
        outputs=[((B, S, K, width), dtype, "bsk_") for width in (H, Hv)],
        static=static,
    )
