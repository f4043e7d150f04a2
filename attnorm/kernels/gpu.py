"""Fused attention on NVIDIA Hopper for any one-pass normaliser, as Pallas kernels with an exact custom VJP.

The kernels are written for Pallas' Mosaic GPU backend and the warpgroup matrix instruction, which Hopper alone has
(H100, H200, GH200). They take bfloat16 and float16: that instruction would round float32 to 11 bits. Other cards
(T4, L4, A100, Blackwell), float32, head dims above 256 and dropout are not served; the automatic choice then takes
``chunked``, or ``reference`` for normalisers that ``chunked`` does not serve either. Where there is a bias, the output
comes from the kernel and the gradients from ``chunked``, by its own forward pass.

A NaN or inf that a query may see makes its output and log-norm NaN, but the query then adds nothing to the gradients of
keys and values, which may stay finite: look for NaN in the output, not in these gradients.

Registers and shared memory fix the block sizes; of :class:`attnorm.kernels.Config`, ``interpret`` is heeded. The
interpreter runs a thread per warpgroup, which wait for each other: XLA needs more threads than a small machine has
cores (in the environment, before JAX starts, ``NPROC=8``).

Letters: B batch, N query heads, K key heads, G query heads per key head, T queries, S keys, H and Hv head dims.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from attnorm import _compat, chunked, sharding
from attnorm.dropout import Dropout
from attnorm.finite import finite_or_zero, has_nonfinite, nan_where
from attnorm.kernels.call import pad_ids, pad_pairs
from attnorm.kernels.schedule import Tiling, make_bounds, make_schedule
from attnorm.kernels.settings import config
from attnorm.masks import Visibility
from attnorm.normalizers.rule import Normalizer
from attnorm.tiling import round_up

_LARGEST_HEAD_DIM = 256
# Versions of CUDA from 12.8.0 to before 12.9.1, as JAX's own attention for Hopper knows.
_MISCOMPILES = (12080, 12091)
# Ahead of time there is a name instead of a card to ask; GH200 has one of these in it.
_HOPPER = ("H100", "H200", "H800", "H20")
# Rows of a tile are gpu_tile's, which older JAX cannot import. A row of shared memory has 128 bytes, and 8 are copied
# at once.
_ROWS, _COLUMNS = 64, 64
_ROWS_COPIED = 8


def supports(query: Array, dropout: Dropout | None, precision) -> str | None:
    """Why these kernels cannot serve a call, or None."""
    if dropout is not None:
        return "dropout is not supported"
    if query.dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {query.dtype} is not supported; bfloat16 and float16 are"
    if query.shape[-1] > _LARGEST_HEAD_DIM:
        return f"head dim {query.shape[-1]} is not supported; up to {_LARGEST_HEAD_DIM} are"
    if isinstance(precision, jax.lax.DotAlgorithmPreset | jax.lax.DotAlgorithm):
        return f"precision {precision!r} is not supported"
    if sharding.is_partitioned_automatically(query):
        return "a kernel cannot be partitioned over a mesh with Auto axes; wrap the call in attnorm.sharded"
    if not _compat.HAS_MOSAIC_GPU:
        return f"it needs JAX 0.12 or newer, this is {jax.__version__}"
    return None if config.value.interpret else _unsuited(_device())


def _device():
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def _unsuited(device):
    capability = getattr(device, "compute_capability", None)
    is_hopper = capability == "9.0"
    if capability is None:
        is_hopper = any(name in device.device_kind for name in _HOPPER)
    if not is_hopper:
        return f"it needs an NVIDIA GPU of the Hopper generation, this is {device.device_kind}"
    version = re.search(r"cuda (\d+)", getattr(getattr(device, "client", None), "platform_version", ""))
    if version and _MISCOMPILES[0] <= int(version[1]) < _MISCOMPILES[1]:
        return f"CUDA {version[1]} compiles masks wrongly; it needs an older one, or 12.9.1"
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
    Hv = value.shape[-1]
    if Hv > _LARGEST_HEAD_DIM:  # in parts: a row of the output has to fit into registers
        parts = [
            attend(
                query,
                key,
                value[..., start : start + _LARGEST_HEAD_DIM],
                bias,
                visibility,
                normalizer,
                scale=scale,
                logits_soft_cap=logits_soft_cap,
                dropout=dropout,
                precision=precision,
            )
            for start in range(0, Hv, _LARGEST_HEAD_DIM)
        ]
        return jnp.concatenate([output for output, _ in parts], axis=-1), parts[0][1]
    static = _Static(
        G=query.shape[2] // key.shape[2],
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        left=visibility.left,
        right=visibility.right,
        precision=precision,
        interpret=_interpreter(),
    )
    heads = query.shape[2:3]
    normalizer = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, heads), normalizer)
    # Inside shard_map every input must vary over the same axes; the transpose of this sums the gradients.
    return _attend(static, *_compat.vary_alike((query, key, value, bias, normalizer, visibility)))


@dataclass(frozen=True)
class _Static:
    """What is known when a kernel is built."""

    G: int
    scale: float
    logits_soft_cap: float | None
    left: int | None
    right: int | None
    precision: Any
    interpret: Any


def _interpreter():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    chosen = config.value.interpret
    return (
        plgpu.InterpretGPUParams() if chosen and not isinstance(chosen, plgpu.InterpretGPUParams) else chosen
    )


def _forward_tiling(query, key, value):
    """128 queries, or 64 where there are no more; as many keys as registers and shared memory hold."""
    T, S = query.shape[1], key.shape[1]
    bk = 128 if max(query.shape[-1], value.shape[-1]) <= 128 else 64
    return Tiling(T, S, min(128, round_up(T, _ROWS)), bk)


def _backward_tilings(query, key, value):
    """Of the kernel for queries, and of that for keys."""
    T, S = query.shape[1], key.shape[1]
    # Of its own side a thread block holds this many rows; of the other, two tiles of 64.
    own = 128 if _padded_width(query) + _padded_width(value) <= 384 else 64
    by_queries = Tiling(T, S, min(own, round_up(T, _ROWS)), _ROWS)
    by_keys = Tiling(T, S, _ROWS, min(own, round_up(S, _ROWS)))
    return by_queries, by_keys


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, bias, normalizer, visibility):
    return _attend_forward(static, query, key, value, bias, normalizer, visibility)[0]


def _attend_forward(static, query, key, value, bias, normalizer, visibility):
    from attnorm.kernels.gpu_forward import forward

    T, Hv = query.shape[1], value.shape[-1]
    tiling = _forward_tiling(query, key, value)
    kernel_key, kernel_value = key, value
    if _hides(visibility):
        # A broken number must not meet the weight 0 of a pair that does not see it. Values stop here, and mark
        # their key, which reaches nothing but its own logits.
        broken = has_nonfinite(key) | has_nonfinite(value)
        kernel_key = key + nan_where(broken, key.dtype)[..., None]
        kernel_value = finite_or_zero(value)
    inputs, schedule = _inputs(
        static, tiling, query, kernel_key, kernel_value, bias, normalizer, visibility, keys_outer=False
    )
    output, m, *stats = forward(static, inputs, schedule, tiling)
    output = checkpoint_name(output[:, :T, :, :Hv], "attnorm_output")
    m, *stats = (jnp.swapaxes(x[..., :T], 1, 2) for x in (m, *stats))
    # Whether a maximum notices a NaN is up to the hardware; a sum does.
    m = m + nan_where(jnp.isnan(stats[0]), m.dtype)
    m, stats = checkpoint_name((m, tuple(stats)), "attnorm_row_state")
    residuals = (query, key, value, bias, normalizer, visibility, output, m, stats)
    return (output, normalizer.log_norm(stats, m)), residuals


def _attend_backward(static, residuals, cotangents):
    *arrays, output, m, stats = residuals
    query, key, value, bias, normalizer, visibility = arrays
    if bias is not None:
        return _backward_with_bias(static, arrays, cotangents)
    d_output, d_log_norm = cotangents

    # Row terms: the finaliser's backward. Let D = <d_output, Σ f v> = <d_output, output> / g.
    # A row that saw no key has no gradient, not even that of a NaN cotangent.
    sees_nothing = functools.reduce(jnp.logical_and, [h == 0 for h in stats])
    d_output = jnp.where(sees_nothing[..., None], 0, d_output)
    delta = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    g, pull_factor = jax.vjp(lambda stats, rule: rule.finalize(stats, m), stats, normalizer)
    d_stats, d_normalizer = pull_factor(delta / jnp.where(g == 0, 1, g))
    if d_log_norm is not None:
        _, pull_log_norm = jax.vjp(lambda stats, rule: rule.log_norm(stats, m), stats, normalizer)
        d_stats, d_normalizer = jax.tree.map(
            jnp.add, (d_stats, d_normalizer), pull_log_norm(d_log_norm.astype(jnp.float32))
        )
    # A row that saw a NaN has none but NaN to give; but in a tile it would reach keys that the row does not see.
    broken = jnp.isnan(m) | jnp.isnan(g)
    rows = [jnp.where(broken, 0, x) for x in (m, g, *d_stats)]
    dq, dk, dv, d_rule = _run_backward(static, arrays, d_output, rows)
    dq = jnp.where(broken[..., None], jnp.nan, dq)
    d_normalizer = jax.tree.map(lambda a, b: a + jnp.sum(b, (0, 2)), d_normalizer, d_rule)
    return dq, dk, dv, None, d_normalizer, None


_attend.defvjp(_attend_forward, _attend_backward)


def _backward_with_bias(static, arrays, cotangents):
    """All gradients by ``chunked``, from its own forward pass."""
    *differentiable, visibility = arrays

    def attend(query, key, value, bias, normalizer):
        return chunked.attend(
            query,
            key,
            value,
            bias,
            visibility,
            normalizer,
            scale=static.scale,
            logits_soft_cap=static.logits_soft_cap,
            dropout=None,
            precision=static.precision,
        )

    _, pull = jax.vjp(attend, *differentiable)
    return *pull(cotangents), None


def _run_backward(static, arrays, d_output, rows):
    """dq, dk, dv and the parameters' gradients by rows; ``rows`` (B, T, N) are m, g and those of the statistics."""
    from attnorm.kernels.gpu_backward import key_gradients, query_gradient

    query, key, value, _, normalizer, visibility = arrays
    if _hides(visibility):  # where one of these was not finite, neither is the state of a row that sees it
        query, key, value = (finite_or_zero(x) for x in (query, key, value))
    d_output = _padded(d_output)
    rows = jnp.stack([jnp.swapaxes(x, 1, 2) for x in rows], axis=2)

    def inputs(tiling, keys_outer):
        inputs, schedule = _inputs(
            static, tiling, query, key, value, None, normalizer, visibility, keys_outer
        )
        padded = jnp.pad(rows, [(0, 0)] * 3 + [(0, tiling.nq * tiling.bq - tiling.T)])
        return inputs._replace(d_output=d_output, rows=padded), schedule

    by_queries, by_keys = _backward_tilings(query, key, value)
    dq, d_rule = query_gradient(static, *inputs(by_queries, keys_outer=False), by_queries)
    key_inputs = inputs(by_keys, keys_outer=True)
    # Both at once where their sums fit into registers.
    together = _padded_width(key) + _padded_width(value) <= 256
    calls = [("key", "value")] if together else [("key",), ("value",)]
    dk, dv = (x for names in calls for x in key_gradients(static, *key_inputs, by_keys, names))
    return _cut(dq, query), _cut(dk, key), _cut(dv, value), d_rule


def _inputs(static, tiling, query, key, value, bias, normalizer, visibility, keys_outer):
    """The padded inputs of a kernel, and the schedule of its tiles."""
    from attnorm.kernels.gpu_tile import Inputs

    T, S = tiling.nq * tiling.bq, tiling.nk * tiling.bk
    query_ids, key_ids, mask = visibility.query_segment_ids, visibility.key_segment_ids, visibility.mask
    if query_ids is not None:
        query_ids, key_ids = pad_ids(query_ids, T), pad_ids(key_ids, S)
    if bias is not None:
        bias = pad_pairs(bias, T, S)
    if mask is not None:
        mask = pad_pairs(mask.astype(jnp.int8), T, S)
        mask = jnp.swapaxes(mask, 2, 3) if keys_outer else mask
    padded = replace(visibility, query_segment_ids=query_ids, key_segment_ids=key_ids)
    schedule, tables = make_schedule(padded, tiling, make_bounds(visibility, tiling), keys_outer=keys_outer)
    inputs = Inputs(
        query=_padded(query),
        key=_padded(key),
        value=_padded(value),
        bias=bias,
        mask=mask,
        query_ids=query_ids,
        key_ids=key_ids,
        rule=normalizer,
        tables=tables,
    )
    return inputs, schedule


def _hides(visibility):
    """Whether some pair of a query and a key may be hidden."""
    return bool(jax.tree.leaves(visibility)) or (visibility.left, visibility.right) != (None, None)


def _padded(x):
    """x (B, L, N, H) with zeros up to lengths and head dims that can be copied in the matrix instruction's layout."""
    length = round_up(x.shape[1], _ROWS_COPIED) - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, length), (0, 0), (0, _padded_width(x) - x.shape[-1])])


def _cut(x, like):
    return x[:, : like.shape[1], :, : like.shape[-1]]


def _padded_width(x):
    return round_up(x.shape[-1], _COLUMNS)
