"""What is compiled and counted for TPUs: our kernels, and those they are compared with.

Causal self-attention, one batch, 8 heads of 128, 4096 tokens, bfloat16; queries scaled beforehand, as the peers
want them. XLA may put operands into vector memory, for the peers as for ours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import attnorm
from attnorm import kernels
from attnorm.attention import implementations_of

HEADS, LENGTH, HEAD_DIM = 8, 4096, 128
BLOCKS = (512, 1024)


@dataclass(frozen=True)
class Subject:
    """A function, the shapes of its arguments, and by pass what its kernels' names contain."""

    function: Callable
    arguments: tuple
    passes: dict[str, str]
    # Bytes of HBM that what follows the kernel must move, by pass.
    extra_bytes: dict[str, int] | None = None


def _array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def _with_gradients(attention):
    def function(query, key, value, cotangent, *params):
        output, pullback = jax.vjp(attention, query, key, value, *params)
        return output, pullback(cotangent)

    return function


# Rows of a report beside "the normaliser with its defaults": parameters that are numbers, and that are one array
# per head.
_VARIANTS: dict[str, dict[str, tuple[dict[str, float], tuple[str, ...]]]] = {
    "lp": {"lp, p = 3": ({"p": 3.0}, ()), "lp, p per head": ({}, ("p",))},
    "sink": {"sink, b per head": ({}, ("b",))},
}


def served(normalizers: Sequence[str]) -> list[str]:
    """Those of the normalisers that our kernels serve."""
    return [name for name in normalizers if "pallas_tpu" in implementations_of(attnorm.get_normalizer(name))]


def rows(normalizers: Sequence[str]) -> dict[str, tuple[str, dict, tuple]]:
    """The rows of a report: normaliser, static parameters, names of the traced ones."""
    return {
        row: (name, *params)
        for name in normalizers
        for row, params in _VARIANTS.get(name, {name: ({}, ())}).items()
    }


def attention(row: str, block: int | None, scale: float | None = 1.0) -> Subject:
    """Our kernels with the normaliser of this row; without a block, those that the kernels choose."""
    name, static, traced = rows(attnorm.normalizer_names())[row]
    blocks = None if block is None else kernels.BlockSizes(block, block)

    def attend(query, key, value, *params):
        # The peers' layout is (heads, length, head dim): then nothing has to be transposed.
        query, key, value = (jnp.swapaxes(x, 0, 1)[None] for x in (query, key, value))
        with kernels.config(kernels.Config(forward=blocks, backward=blocks)):
            output = attnorm.dot_product_attention(
                query,
                key,
                value,
                normalizer=attnorm.get_normalizer(name, **static, **dict(zip(traced, params, strict=True))),
                is_causal=True,
                scale=scale,
                implementation="pallas_tpu",
            )
        return jnp.swapaxes(output[0], 0, 1)

    arrays = (_array(HEADS, LENGTH, HEAD_DIM),) * 4
    params = tuple(_array(HEADS, dtype=jnp.float32) for _ in traced)
    return Subject(
        _with_gradients(attend),
        arrays + params,
        {"forward": "attnorm_forward", "backward": "attnorm_backward"},
    )


def splash(block: int, fused: bool) -> Subject:
    """The softmax attention of ``jax.experimental.pallas.ops.tpu.splash_attention``; split or fused backward."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        CausalMask,
        MultiHeadMask,
        make_splash_mha,
    )

    names = ["block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"]
    names += [] if fused else ["block_q_dq", "block_kv_dq"]
    blocks: dict[str, Any] = dict.fromkeys(names, block)
    attend = make_splash_mha(
        mask=MultiHeadMask([CausalMask((LENGTH, LENGTH))] * HEADS),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=BlockSizes(**blocks, use_fused_bwd_kernel=fused),
    )
    array = _array(HEADS, LENGTH, HEAD_DIM)
    extra = None
    if fused:
        # It leaves a gradient of the queries per block of keys; their sum reads all and writes one.
        extra = {"backward": (LENGTH // block + 1) * array.size * array.dtype.itemsize}
    return Subject(
        _with_gradients(attend), (array,) * 4, {"forward": "_fwd_", "backward": "_d"}, extra_bytes=extra
    )


def flash(block: int) -> Subject:
    """The softmax attention of ``jax.experimental.pallas.ops.tpu.flash_attention``."""
    from jax.experimental.pallas.ops.tpu.flash_attention import BlockSizes, flash_attention

    blocks = BlockSizes(block_q=block, block_k_major=block, block_k=block, block_b=1)
    attend = functools.partial(flash_attention, causal=True, block_sizes=blocks)
    return Subject(attend, (_array(1, HEADS, LENGTH, HEAD_DIM),) * 3, {"forward": ""})


def matmul(block: int, size: int = 4096) -> Subject:
    """A tiled product of two square matrices: what the matrix units can do."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def kernel(a, b, out, total):
        k = pl.program_id(2)

        @pl.when(k == 0)
        def _():
            total[...] = jnp.zeros_like(total)

        total[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

        @pl.when(k == pl.num_programs(2) - 1)
        def _():
            out[...] = total[...].astype(out.dtype)

    call = pl.pallas_call(
        kernel,
        grid=(size // block,) * 3,
        in_specs=[
            pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
            pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block, block), lambda i, j, k: (i, j)),
        out_shape=_array(size, size),
        scratch_shapes=[pltpu.VMEM((block, block), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=48 * 2**20
        ),
        name="matmul",
    )
    return Subject(call, (_array(size, size),) * 2, {"forward": ""})
