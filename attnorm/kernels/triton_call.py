"""One Pallas call for Triton with trees of arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from attnorm import _compat
from attnorm.kernels.tile import block_spec, spread

# Of a program; with half of them the registers of the two-byte kernels spill.
_WARPS = 8
# Tiles that are in shared memory or under way to it.
_STAGES = 2


def kernel_call(kernel, *, name, grid, inputs, axes, blocks, locate, outputs, static) -> Any:
    """Calls ``kernel(inputs, outputs)``, both of references to the blocks of one program.

    ``axes`` names the dimensions of every input, ``blocks`` and ``locate`` say how these are cut: see
    :func:`attnorm.kernels.tile.block_spec`. ``outputs`` are (shape, dtype, axes).
    """
    from jax.experimental.pallas import triton

    letters = jax.tree.leaves(spread(axes, inputs))
    inputs, tree = jax.tree.flatten(inputs)
    varying = _compat.varying_axes(inputs)
    inputs = _compat.vary([jnp.asarray(x) for x in inputs], varying)
    shapes = [_compat.shape_dtype_struct(shape, dtype, varying) for shape, dtype, _ in outputs]

    def flat_kernel(*refs):
        kernel(tree.unflatten(refs[: len(inputs)]), refs[len(inputs) :])

    flat_kernel.__name__ = name  # which Triton takes for the kernel's
    return pl.pallas_call(
        flat_kernel,
        name=name,
        grid=grid,
        in_specs=[block_spec(x, of, blocks, locate) for x, of in zip(inputs, letters, strict=True)],
        out_specs=[block_spec(x, of, blocks, locate) for x, (*_, of) in zip(shapes, outputs, strict=True)],
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=_WARPS, num_stages=_STAGES),
        interpret=bool(static.interpret),
    )(*inputs)
