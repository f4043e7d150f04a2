"""Portable kernels for NVIDIA GPUs, on Pallas' Triton backend: the layout and the tiles of their inputs.

Triton compiles for compute capability 8.0 and newer: A100, L4, Hopper, Blackwell, but not T4. JAX has deprecated the
backend and will remove it; where it is gone, these kernels refuse every call.

Matrix products of float32 round their inputs to 11 bits, as XLA's do on these cards, unless a precision above the
default is asked for.

Letters: B batch, N query heads, K key heads, T queries, S keys, H and Hv head dims.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from attnorm import _compat
from attnorm.finite import finite_or_zero, has_nonfinite, nan_where
from attnorm.kernels.call import hides, pad_ids, pad_pairs
from attnorm.kernels.schedule import Tiling, make_bounds, make_schedule
from attnorm.kernels.slopes import MOST_KEPT
from attnorm.kernels.tile import rule_tiles
from attnorm.kernels.triton_backward import key_gradients, query_gradient
from attnorm.kernels.triton_forward import forward
from attnorm.kernels.triton_tile import Inputs

_OLDEST = (8, 0)
# Sides of a tile are powers of two, for Triton, and at least what its matrix product takes.
_SMALLEST_SIDE = 16


class _Blocks(NamedTuple):
    """Queries and keys of a tile."""

    query: int
    key: int


# The largest by compilation that registers hold, and L4's shared memory: by how numbers are multiplied (of two bytes;
# of float32 rounded to 11 bits, the default; of float32 as they are) and by the larger head dim, padded.
_FORWARD = {
    "narrow": {64: _Blocks(128, 64), 128: _Blocks(128, 64), 256: _Blocks(64, 32)},
    "rounded": {64: _Blocks(64, 32), 128: _Blocks(64, 32), 256: _Blocks(32, 16)},
    "exact": {64: _Blocks(64, 32), 128: _Blocks(32, 32), 256: _Blocks(32, 16)},
}
_BACKWARD = {
    "narrow": {64: _Blocks(64, 32), 128: _Blocks(64, 32), 256: _Blocks(32, 32)},
    "rounded": {64: _Blocks(32, 32), 128: _Blocks(32, 32), 256: _Blocks(16, 16)},
    "exact": {64: _Blocks(32, 32), 128: _Blocks(16, 16), 256: _Blocks(16, 16)},
}
# With numbers of two bytes, a rule that holds more tiles at once gets half the queries.
_MOST_FORWARD = 3


def refusal(dtype, device) -> str | None:
    """Why these kernels cannot serve a dtype on a device (None: interpreted), or None."""
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"dtype {dtype} is not supported"
    if not _compat.HAS_PALLAS_TRITON:
        return "this JAX has no Triton backend of Pallas"
    return None if device is None else _unsuited(device)


def _unsuited(device):
    wanted = "it needs an NVIDIA GPU of compute capability 8.0 or newer"
    capability = getattr(device, "compute_capability", None)
    if capability is None:  # ahead of time there is only a name; older cards are called Tesla
        return None if "NVIDIA" in device.device_kind else f"{wanted}, this is {device.device_kind}"
    numbers = str(capability).split(".")
    if not all(x.isdecimal() for x in numbers) or tuple(map(int, numbers)) < _OLDEST:
        return f"{wanted}, this is {device.device_kind} with {capability}"
    return None


def interpreter(chosen):
    """How to run the kernels, from what the settings say."""
    return bool(chosen)


def run_forward(static, query, key, value, bias, normalizer, visibility):
    """The output (B, T, N, Hv), and the row state: m and the statistics (B, N, T)."""
    T, Hv = query.shape[1], value.shape[-1]
    is_heavy = rule_tiles(normalizer, backward=False) > _MOST_FORWARD
    tiling = _tiling(static, _FORWARD, query, key, value, is_heavy)
    arrays = (query, key, value, bias)
    inputs, schedule = _inputs(static, tiling, *arrays, normalizer, visibility, keys_outer=False)
    output, *rows = forward(static, inputs, schedule, tiling)
    return output[:, :T, :, :Hv], *(x[..., :T] for x in rows)


def run_backward(static, query, key, value, normalizer, visibility, d_output, rows):
    """dq, dk, dv and the parameters' gradients by rows, a rule of (B, N, T); ``rows`` are (B, N, rows, T)."""
    is_heavy = rule_tiles(normalizer, backward=True) > MOST_KEPT
    tiling = _tiling(static, _BACKWARD, query, key, value, is_heavy)
    T = tiling.nq * tiling.bq

    def inputs(keys_outer):
        arrays = (query, key, value, None)
        inputs, schedule = _inputs(static, tiling, *arrays, normalizer, visibility, keys_outer)
        broken = inputs.broken
        if broken is not None:
            broken = broken | jnp.any(jnp.isnan(rows))
        padded = jnp.pad(rows, [(0, 0)] * 3 + [(0, T - tiling.T)])
        return inputs._replace(broken=broken, d_output=_padded(d_output, T), rows=padded), schedule

    dq, d_rule = query_gradient(static, *inputs(keys_outer=False), tiling)
    dk, dv = key_gradients(static, *inputs(keys_outer=True), tiling)
    return _cut(dq, query), _cut(dk, key), _cut(dv, value), d_rule


def _tiling(static, table, query, key, value, is_heavy):
    T, S = query.shape[1], key.shape[1]
    kind = "narrow"
    if query.dtype == jnp.float32:
        kind = "exact" if static.precision == jax.lax.Precision.HIGHEST else "rounded"
    blocks = table[kind][max(64, _padded_width(query), _padded_width(value))]
    bq = blocks.query // 2 if is_heavy and kind == "narrow" else blocks.query
    return Tiling(T, S, min(bq, _power_of_two(T)), min(blocks.key, _power_of_two(S)))


def _inputs(static, tiling, query, key, value, bias, normalizer, visibility, keys_outer):
    """The padded inputs of a kernel, and the schedule of its tiles."""
    T, S = tiling.nq * tiling.bq, tiling.nk * tiling.bk
    query_ids, key_ids, mask = visibility.query_segment_ids, visibility.key_segment_ids, visibility.mask
    if query_ids is not None:
        query_ids, key_ids = pad_ids(query_ids, T), pad_ids(key_ids, S)
    if bias is not None:
        bias = pad_pairs(bias, T, S)
    if mask is not None:
        mask = pad_pairs(mask, T, S)
        # Triton counts in 32 bits, with a sign, up to 2^32 bytes: past 2^31 elements these must be more than a byte.
        mask = mask.astype(jnp.int8 if mask.size <= 2**31 else jnp.int16)
        mask = jnp.swapaxes(mask, 2, 3) if keys_outer else mask
    broken, marks = None, (None,) * 3
    if hides(visibility):
        lengths = (T, S, S)
        marks = [_mark(x, length) for x, length in zip((query, key, value), lengths, strict=True)]
        broken = jnp.any(jnp.stack([jnp.any(jnp.isnan(mark)) for mark in marks]))[None].astype(jnp.int32)
        query, key, value = (finite_or_zero(x) for x in (query, key, value))
    padded = replace(visibility, query_segment_ids=query_ids, key_segment_ids=key_ids)
    schedule, tables = make_schedule(padded, tiling, make_bounds(visibility, tiling), keys_outer=keys_outer)
    query_mark, key_mark, value_mark = marks
    inputs = Inputs(
        query=_padded(query, T),
        key=_padded(key, S),
        value=_padded(value, S),
        bias=bias,
        mask=mask,
        query_ids=query_ids,
        key_ids=key_ids,
        rule=normalizer,
        tables=tables,
        broken=broken,
        query_mark=query_mark,
        key_mark=key_mark,
        value_mark=value_mark,
    )
    return inputs, schedule


def _mark(x, length):
    """NaN for every row of x (B, L, N, H) that is not finite, else 0: (B, N, length)."""
    mark = jnp.swapaxes(nan_where(has_nonfinite(x), jnp.float32), 1, 2)
    return jnp.pad(mark, [(0, 0), (0, 0), (0, length - x.shape[1])])


def _padded(x, length):
    """x (B, L, N, H) with zeros up to this length, and up to a head dim that is a power of two."""
    return jnp.pad(x, [(0, 0), (0, length - x.shape[1]), (0, 0), (0, _padded_width(x) - x.shape[-1])])


def _cut(x, like):
    return x[:, : like.shape[1], :, : like.shape[-1]]


def _padded_width(x):
    return _power_of_two(x.shape[-1])


def _power_of_two(size):
    return max(_SMALLEST_SIDE, 1 << (size - 1).bit_length())
