"""Kernels for NVIDIA Hopper, on Pallas' Mosaic GPU backend: the layout and the tiles of their inputs.

They need the warpgroup matrix instruction, which Hopper alone has (H100, H200, GH200), and which would round float32
to 11 bits: so they take bfloat16 and float16.

Where pairs can be hidden, a value that is NaN or inf breaks its key too: of queries that see it not only the output
is NaN, but the log-norm, and all that they give to gradients; but by rules whose numerators know no maximum (relu and
its like) such a query gives nothing to the gradients of keys and values, which may stay finite.

The interpreter runs a thread per warpgroup, which wait for each other: XLA needs more threads than a small machine
has cores (in the environment, before JAX starts, ``NPROC=8``).

Letters: B batch, N query heads, K key heads, T queries, S keys, H and Hv head dims.
"""

from __future__ import annotations

import re
from dataclasses import replace

import jax
import jax.numpy as jnp

from attnorm import _compat
from attnorm.finite import finite_or_zero, has_nonfinite, nan_where
from attnorm.kernels.call import hides, pad_ids, pad_pairs
from attnorm.kernels.schedule import Tiling, make_bounds, make_schedule
from attnorm.kernels.tile import rule_tiles
from attnorm.tiling import round_up

# Versions of CUDA from 12.8.0 to before 12.9.1, as JAX's own attention for Hopper knows.
_MISCOMPILES = (12080, 12091)
# Ahead of time there is a name instead of a card to ask; GH200 has one of these in it.
_HOPPER = ("H100", "H200", "H800", "H20")
# Rows of a tile are gpu_tile's, which older JAX cannot import. A row of shared memory has 128 bytes, and 8 are copied
# at once.
_ROWS, _COLUMNS = 64, 64
_ROWS_COPIED = 8
# Any logit less this is beyond exp.
_LOWEST = -1e30
# Tiles of 128 keys that the scalar functions of a rule may hold at once, by what compiled.
_RULE_TILES = 3


def refusal(dtype, device) -> str | None:
    """Why these kernels cannot serve a dtype on a device (None: interpreted), or None."""
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"dtype {dtype} is not supported; bfloat16 and float16 are"
    if not _compat.HAS_MOSAIC_GPU:
        return f"it needs JAX 0.12 or newer, this is {jax.__version__}"
    return None if device is None else _unsuited(device)


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


def interpreter(chosen):
    """How to run the kernels, from what the settings say."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return (
        plgpu.InterpretGPUParams() if chosen and not isinstance(chosen, plgpu.InterpretGPUParams) else chosen
    )


def run_forward(static, query, key, value, bias, normalizer, visibility):
    """The output (B, T, N, Hv), and the row state: m and the statistics (B, N, T)."""
    from attnorm.kernels.gpu_forward import forward

    T, S, Hv = query.shape[1], key.shape[1], value.shape[-1]
    # As many keys as registers and shared memory hold.
    is_small = max(query.shape[-1], Hv) <= 128 and rule_tiles(normalizer, backward=False) <= _RULE_TILES
    bk = 128 if is_small else 64
    tiling = Tiling(T, S, min(128, round_up(T, _ROWS)), bk)
    if hides(visibility):
        # A broken number must not meet the weight 0 of a pair that does not see it. Values stop here, and mark
        # their key, which reaches nothing but its own logits.
        broken = has_nonfinite(key) | has_nonfinite(value)
        key = key + nan_where(broken, key.dtype)[..., None]
        value = finite_or_zero(value)
    inputs, schedule = _inputs(
        static, tiling, query, key, value, bias, normalizer, visibility, keys_outer=False
    )
    output, *rows = forward(static, inputs, schedule, tiling)
    output = output[:, :T, :, :Hv]
    m, *stats = (x[..., :T] for x in rows)
    if hides(visibility):  # so that the gradients know the row
        m = m + nan_where(jnp.swapaxes(jnp.any(jnp.isnan(output), axis=-1), 1, 2), m.dtype)
    return output, m, *stats


def run_backward(static, query, key, value, normalizer, visibility, d_output, rows):
    """dq, dk, dv and the parameters' gradients by rows, a rule of (B, N, T); ``rows`` are (B, N, rows, T)."""
    from attnorm.kernels.gpu_backward import key_gradients, query_gradient

    d_output = _padded(d_output)
    broken = jnp.isnan(rows[:, :, 1])
    if hides(visibility):  # where one of these was not finite, neither is the state of a row that sees it
        query, key, value = (finite_or_zero(x) for x in (query, key, value))
        rows = jnp.where(broken[:, :, None], _rows_of_nan(normalizer, rows.shape[2]), rows)

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
    dq = jnp.where(jnp.swapaxes(broken, 1, 2)[..., None], jnp.nan, _cut(dq, query))
    return dq, _cut(dk, key), _cut(dv, value), d_rule


def _rows_of_nan(normalizer, num_rows):
    """What a row that has none but NaN to give is replaced with, so that it gives nothing to keys that it does not see.

    Its d_output is 0. With a very low m its numerators are inf, but 0 at hidden keys: times 0, NaN there and 0 here.
    Where numerators do not depend on m, it gives nothing to any key.
    """
    m, g = (_LOWEST, 1.0) if normalizer.uses_max else (0.0, 0.0)
    return jnp.array([m, g, *[0.0] * (num_rows - 2)], jnp.float32)[:, None]


def _backward_tilings(query, key, value):
    """Of the kernel for queries, and of that for keys."""
    T, S = query.shape[1], key.shape[1]
    # Of its own side a thread block holds this many rows; of the other, two tiles of 64.
    own = 128 if _padded_width(query) + _padded_width(value) <= 384 else 64
    by_queries = Tiling(T, S, min(own, round_up(T, _ROWS)), _ROWS)
    by_keys = Tiling(T, S, _ROWS, min(own, round_up(S, _ROWS)))
    return by_queries, by_keys


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


def _padded(x):
    """x (B, L, N, H) with zeros up to lengths and head dims that can be copied in the matrix instruction's layout."""
    length = round_up(x.shape[1], _ROWS_COPIED) - x.shape[1]
    return jnp.pad(x, [(0, 0), (0, length), (0, 0), (0, _padded_width(x) - x.shape[-1])])


def _cut(x, like):
    return x[:, : like.shape[1], :, : like.shape[-1]]


def _padded_width(x):
    return round_up(x.shape[-1], _COLUMNS)
