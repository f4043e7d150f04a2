"""Fused attention on TPU for any one-pass normaliser, as Pallas kernels with an exact custom VJP.

The kernels compute tiles; what is linear in the number of rows (the finaliser's backward, the factors of the
output's cotangent, the log-norm) stays here, in plain JAX.

Letters: B batch, N query heads, K key heads, G query heads per key head, T queries, S keys, H and Hv head dims.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from attnorm import _compat, sharding
from attnorm.dropout import Dropout
from attnorm.kernels.backward import backward, bias_backward
from attnorm.kernels.call import (
    heads_first,
    heads_last,
    pad_ids,
    pad_pairs,
    precision_asked,
    product_precision,
    rows_first,
    rows_last,
)
from attnorm.kernels.forward import forward
from attnorm.kernels.schedule import Tiling, make_bounds
from attnorm.kernels.settings import (
    LANES,
    SUBLANES,
    backward_blocks,
    config,
    device,
    dq_bytes,
    forward_blocks,
    vmem_bytes,
)
from attnorm.kernels.tile import TRANSPOSED_AXES, Inputs, rule_tiles, spread
from attnorm.masks import Visibility
from attnorm.normalizers.rule import Normalizer, Partial
from attnorm.rows import row_gradients, row_products, sees_nothing, sum_gradients
from attnorm.tiling import even_block, round_up


def supports(query: Array, normalizer: Normalizer, dropout: Dropout | None, precision) -> str | None:
    """Why these kernels cannot serve a call with a normaliser whose ``needs`` they serve, or None."""
    if dropout is not None:
        return "dropout is not supported"
    if query.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype} is not supported"
    if product_precision(precision) is NotImplemented:
        return f"precision {precision_asked(precision)!r} is not supported"
    if sharding.is_partitioned_automatically(query):
        return "a kernel cannot be partitioned over a mesh with Auto axes; wrap the call in attnorm.sharded"
    if sharding.is_replicated_over_explicit_axes(query):
        return (
            "the query is replicated over Explicit axes; shard it along batch or heads, or use jax.shard_map"
        )
    if not config.value.interpret and not device().device_kind.startswith("TPU"):
        return f"it needs a TPU, this is {device().device_kind}"
    return None


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Float[Array, "b n t s"] | None,
    visibility: Visibility,
    normalizer: Normalizer,
    *,
    scale: float,
    logits_soft_cap: float | None,
    dropout: None,
    precision,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"] | None]:
    """Output in query's dtype, and the log-norm in float32. No dimension may be 0."""
    static, arrays = _prepared(
        query, key, value, bias, visibility, normalizer, scale, logits_soft_cap, precision
    )
    output, log_norm = _attend(static, *arrays)
    return output.astype(query.dtype), log_norm


def partial_attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Float[Array, "b n t s"] | None,
    visibility: Visibility,
    normalizer: Normalizer,
    *,
    scale: float,
    logits_soft_cap: float | None,
    precision,
) -> Partial:
    """The row state over these keys only, (B, T, N, ...) in float32, to be merged with that over others.

    Differentiable as if m were constant. That is exact for whatever does not depend on the choice of m, such as the
    output and the log-norm of merged parts: so the parts' gradients are those of attention over all keys.

    Raises:
      ValueError: a normaliser that needs more than its three functions.
    """
    if normalizer.needs:
        raise ValueError(
            f"normalizer {normalizer} needs {', '.join(sorted(normalizer.needs))}, which these kernels do not know"
        )
    static, arrays = _prepared(
        query, key, value, bias, visibility, normalizer, scale, logits_soft_cap, precision
    )
    return _partial(static, *arrays)


def partial_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    visibility: Visibility,
    normalizer: Normalizer,
    m: Float[Array, "B T N 1"],
    d_accumulator: Float[Array, "B T N Hv"],
    d_stats: tuple[Float[Array, "B T N 1"], ...],
    factor: None,
    *,
    scale: float,
    logits_soft_cap: float | None,
    precision,
) -> tuple[Array, Array, Array, Normalizer]:
    """What these keys add to dq and to the parameters' gradients, and their own dk and dv, in float32.

    From the reference m of whole rows, held constant, and the gradients of their ``Σ f v`` and statistics.
    """
    static, arrays = _prepared(
        query, key, value, None, visibility, normalizer, scale, logits_soft_cap, precision
    )
    m, d_stats = jax.tree.map(lambda x: x[..., 0], (m, d_stats))
    dq, dk, dv, _, d_normalizer, _ = _run_backward(static, arrays, m, d_accumulator, d_stats, jnp.float32)
    return dq, dk, dv, d_normalizer


def _prepared(query, key, value, bias, visibility, normalizer, scale, logits_soft_cap, precision):
    """What is known now, and the arrays in the types and shapes that the kernels are written for."""
    if query.dtype == jnp.float16:  # TPUs have no float16
        query, key, value = (x.astype(jnp.float32) for x in (query, key, value))
    # A power of two, or float32, takes the scale into the queries; elsewhere that would round them again.
    is_exact = query.dtype == jnp.float32 or math.frexp(abs(scale))[0] in (0, 0.5)
    T, S = query.shape[1], key.shape[1]
    dense = [x for x in (bias, visibility.mask) if x is not None and 1 not in x.shape[2:]]

    def tiling(choose_blocks, backward):
        blocks = choose_blocks(
            tuple(round_up(x.shape[-1], LANES) for x in (query, value)),
            itemsize=query.dtype.itemsize,
            dense_bytes=sum(x.dtype.itemsize for x in dense),
            rule_tiles=rule_tiles(normalizer, backward),
        )
        return Tiling(T, S, even_block(T, blocks.query, LANES), even_block(S, blocks.key, LANES))

    static = _Static(
        G=query.shape[2] // key.shape[2],
        scale=scale,
        logit_factor=1.0 if is_exact else scale,
        logits_soft_cap=logits_soft_cap,
        left=visibility.left,
        right=visibility.right,
        precision=product_precision(precision),
        vmem_bytes=vmem_bytes(),
        interpret=config.value.interpret,
        forward=tiling(forward_blocks, backward=False),
        backward=tiling(backward_blocks, backward=True),
    )
    heads = query.shape[2:3]
    normalizer = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, heads), normalizer)
    # Inside shard_map every input must vary over the same axes; the transpose of this sums the gradients.
    return static, _compat.vary_alike((query, key, value, bias, normalizer, visibility))


@dataclass(frozen=True)
class _Static:
    """What is known when a kernel is built. ``logit_factor`` is the part of the scale left to the kernels."""

    G: int
    scale: float
    logit_factor: float
    logits_soft_cap: float | None
    left: int | None
    right: int | None
    precision: Any
    vmem_bytes: int
    interpret: Any
    forward: Tiling
    backward: Tiling
    tiling: Tiling | None = None
    is_partial: bool = False


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, bias, normalizer, visibility):
    return _attend_forward(static, query, key, value, bias, normalizer, visibility)[0]


def _attend_forward(static, *arrays):
    output, m, stats = _run_forward(static, *arrays)
    output = checkpoint_name(output, "attnorm_output")
    m, stats = checkpoint_name((m, stats), "attnorm_row_state")
    *_, normalizer, _ = arrays
    return (output, normalizer.log_norm(stats, m)), (arrays, output, m, stats)


def _attend_backward(static, residuals, cotangents):
    arrays, output, m, stats = residuals
    *_, normalizer, _ = arrays
    d_output, d_log_norm = cotangents

    d_output = jnp.where(sees_nothing(stats)[..., None], 0, d_output.astype(jnp.float32))
    by_head = (jnp.swapaxes(x, 1, 2) for x in (d_output, output))
    delta = jnp.swapaxes(row_products(*by_head, static.precision, LANES), 1, 2)
    g, d_stats, d_normalizer = row_gradients(normalizer, stats, m, delta, d_log_norm)
    d_accumulator = sum_gradients(d_output, g[..., None])
    *d_arrays, d_rule, none = _run_backward(static, arrays, m, d_accumulator, d_stats)
    return *d_arrays, jax.tree.map(jnp.add, d_normalizer, d_rule), none


_attend.defvjp(_attend_forward, _attend_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _partial(static, query, key, value, bias, normalizer, visibility):
    return _partial_forward(static, query, key, value, bias, normalizer, visibility)[0]


def _partial_forward(static, *arrays):
    accumulator, m, stats = _run_forward(replace(static, is_partial=True), *arrays)
    columns = jax.tree.map(lambda x: x[..., None], (m, stats))
    return Partial(accumulator, *columns), (arrays, m, stats)


def _partial_backward(static, residuals, cotangent):
    arrays, m, stats = residuals
    is_empty = sees_nothing(stats)
    d_accumulator = jnp.where(is_empty[..., None], 0, cotangent.accumulator)
    d_stats = tuple(jnp.where(is_empty, 0, d[..., 0]) for d in cotangent.stats)
    return _run_backward(static, arrays, m, d_accumulator, d_stats)


_partial.defvjp(_partial_forward, _partial_backward)


def _run_forward(static, query, key, value, bias, normalizer, visibility):
    """The forward kernel: the output, or the accumulator, (B, T, N, Hv), and the row state (B, T, N)."""
    tiling = static.forward
    static = replace(static, tiling=tiling)
    inputs, padded = _inputs(static, query, key, value, bias, normalizer, visibility)
    output, m, stats = forward(static, inputs, padded, make_bounds(visibility, tiling))
    m, stats = jax.tree.map(lambda x: rows_last(x, tiling.T), (m, stats))
    return heads_last(output, tiling.T, value.shape[-1]), m, stats


def _run_backward(static, arrays, m, d_accumulator, d_stats, dtype=None):
    """The backward kernels: gradients of the arrays from those of Σ f v and of the statistics, with m constant.

    dq, dk and dv are in ``dtype``, by default that of the query.
    """
    query, key, value, bias, normalizer, visibility = arrays
    tiling = static.backward
    static = replace(static, tiling=tiling)
    T, Hv = tiling.nq * tiling.bq, round_up(value.shape[-1], LANES)
    inputs, padded = _inputs(static, query, key, value, bias, normalizer, visibility, transposed=True)
    inputs = inputs._replace(
        d_output=heads_first(d_accumulator.astype(query.dtype), T, Hv),
        m=rows_first(m, T),
        d_stats=tuple(rows_first(x, T) for x in d_stats),
    )
    dq, dk, dv, d_rule = _backward_by_chunks(static, inputs, padded, jnp.dtype(dtype or query.dtype))
    dq = heads_last(dq, tiling.T, query.shape[-1])
    dk, dv = heads_last(dk, tiling.S, key.shape[-1]), heads_last(dv, tiling.S, value.shape[-1])
    d_rule = jax.tree.map(lambda x: jnp.sum(x, (0, 2, 3)), d_rule)
    d_bias = None
    if bias is not None:
        d_bias = bias_backward(static, inputs, padded, make_bounds(visibility, tiling))
        d_bias = jnp.swapaxes(d_bias, 2, 3)[:, :, : bias.shape[2], : bias.shape[3]].astype(bias.dtype)
    return dq, dk, dv, d_bias, d_rule, None


def _inputs(static, query, key, value, bias, normalizer, visibility, transposed=False):
    """The padded inputs of a kernel, and the visibility with its arrays padded."""
    tiling = static.tiling
    T, S = tiling.nq * tiling.bq, tiling.nk * tiling.bk
    H, Hv = (round_up(x.shape[-1], LANES) for x in (query, value))
    if static.logit_factor == 1:
        query = (query.astype(jnp.float32) * static.scale).astype(query.dtype)
    query_ids, key_ids, mask = visibility.query_segment_ids, visibility.key_segment_ids, visibility.mask
    columns, rows = query_ids, key_ids
    if query_ids is not None:
        query_ids, key_ids = pad_ids(query_ids, T), pad_ids(key_ids, S)
        columns, rows = query_ids[:, :, None], key_ids[:, None]
        if transposed:
            columns, rows = query_ids[:, None], key_ids[:, :, None]
    if bias is not None:
        bias = pad_pairs(bias, T, S)
    if mask is not None:
        mask = pad_pairs(mask.astype(jnp.int8), T, S)
    if transposed:
        bias, mask = (None if x is None else jnp.swapaxes(x, 2, 3) for x in (bias, mask))
    inputs = Inputs(
        query=heads_first(query, T, H),
        key=heads_first(key, S, H),
        value=heads_first(value, S, Hv),
        bias=bias,
        mask=mask,
        query_ids=columns,
        key_ids=rows,
        rule=jax.tree.map(
            lambda leaf: jnp.broadcast_to(leaf[:, None, None], (*leaf.shape, SUBLANES, LANES)), normalizer
        ),
    )
    return inputs, replace(visibility, query_segment_ids=query_ids, key_segment_ids=key_ids)


def _backward_by_chunks(static, inputs, visibility, dtype):
    """dq, dk, dv and the parameters' gradients, over chunks of queries whose dq fits in vector memory."""
    tiling = static.tiling
    B, N, T, H = inputs.query.shape
    per_tile = static.G * tiling.bq * H * (4 + 2 * dtype.itemsize)
    chunks = -(-tiling.nq * per_tile // dq_bytes())
    if chunks == 1:
        return backward(static, inputs, visibility, make_bounds(visibility, tiling), (dtype,) * 3)

    size = -(-tiling.nq // chunks) * tiling.bq
    chunks = -(-T // size)
    static = replace(static, tiling=replace(tiling, T=size))

    def part(x, axis, c):
        return x if x.shape[axis] == 1 else jax.lax.dynamic_slice_in_dim(x, c * size, size, axis)

    def pad(x, axis):
        width = 0 if x.shape[axis] == 1 else chunks * size - T
        return jnp.pad(x, [(0, width if a == axis else 0) for a in range(x.ndim)])

    def over_queries(fn, inputs, visibility):
        """Applies ``fn(x, axis of the queries)`` where there is one."""
        inputs = jax.tree.map(
            lambda x, letters: fn(x, letters.index("q")) if "q" in letters else x,
            inputs,
            spread(TRANSPOSED_AXES, inputs),
        )
        ids = visibility.query_segment_ids
        return inputs, replace(visibility, query_segment_ids=None if ids is None else fn(ids, 1))

    inputs, visibility = over_queries(pad, inputs, visibility)

    def chunk(sums, c):
        own = over_queries(lambda x, axis: part(x, axis, c), inputs, visibility)
        bounds = make_bounds(visibility, static.tiling, first_query=c * size)
        dq, *more = backward(static, *own, bounds, (dtype, jnp.float32, jnp.float32))
        return jax.tree.map(jnp.add, sums, tuple(more)), dq

    zeros = (
        *(jnp.zeros(x.shape, jnp.float32) for x in (inputs.key, inputs.value)),
        jax.tree.map(lambda leaf: jnp.zeros((B, *leaf.shape), jnp.float32), inputs.rule),
    )
    (dk, dv, d_rule), dq = jax.lax.scan(chunk, _compat.vary_like(zeros, inputs.query), jnp.arange(chunks))
    return jnp.moveaxis(dq, 0, 2).reshape(B, N, -1, H), dk.astype(dtype), dv.astype(dtype), d_rule
