"""Which kernels run, block sizes and memory of those for TPUs, and how to run all of them without a device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental.pallas import tpu as pltpu

# A vector register holds 8 rows of 128 lanes; tiles are multiples of its lanes in both directions.
SUBLANES = 8
LANES = 128
_MIB = 2**20
# Without knowledge of the chip (compiling ahead of time): the memory of the smallest one supported.
_SMALLEST_VMEM = 16 * _MIB


@dataclass(frozen=True)
class BlockSizes:
    """How many queries and keys a tile holds at most; multiples of 128."""

    query: int
    key: int

    def __post_init__(self):
        for name, size in (("query", self.query), ("key", self.key)):
            if not isinstance(size, int) or size < 1 or size % LANES:
                raise ValueError(f"block size {name} must be a positive multiple of {LANES}, got {size!r}")


@dataclass(frozen=True)
class Config:
    """How kernels are built. Used as a context, also around ``jax.jit``:

    >>> import jax.numpy as jnp
    >>> import attnorm
    >>> from attnorm import kernels
    >>> query, key, value = jnp.ones((3, 1, 128, 2, 64))
    >>> with kernels.config(kernels.Config(interpret=True)):
    ...     out = attnorm.dot_product_attention(query, key, value, implementation="pallas_tpu")
    >>> out.shape
    (1, 128, 2, 64)

    Attributes:
      forward: block sizes of the forward kernel; None takes them from a table per kind of device.
      backward: block sizes of the backward kernels, likewise.
      vmem_bytes: vector memory that a kernel may use; None is three quarters of what the device has.
      gpu: on a GPU, the kernels to use: "hopper" or "portable"; None is the first of these that serves the call.
      interpret: run without a TPU or GPU: True, or ``pltpu.InterpretParams`` to simulate the DMAs too.
    """

    forward: BlockSizes | None = None
    backward: BlockSizes | None = None
    vmem_bytes: int | None = None
    gpu: str | None = None
    interpret: Any = False

    def __post_init__(self):
        if self.gpu not in (None, "hopper", "portable"):
            raise ValueError(f'gpu must be None, "hopper" or "portable", got {self.gpu!r}')


config = jax.make_user_context(Config())


def device() -> Any:
    """What kernels are built for: the device of the mesh in the context, which need not be here, or JAX's first."""
    return jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]


def vmem_bytes() -> int:
    """The vector memory that one kernel may use."""
    if config.value.vmem_bytes is not None:
        return config.value.vmem_bytes
    return _capacity() * 3 // 4


def dq_bytes() -> int:
    """The part of it that is left to the gradient of the queries."""
    return vmem_bytes() // 2


def forward_blocks(
    head_dims: tuple[int, int], itemsize: int, dense_bytes: int, rule_tiles: int
) -> BlockSizes:
    """Blocks of the forward kernel, for head dims H and Hv, padded.

    ``dense_bytes``: of mask and bias, for every pair of a tile; ``rule_tiles``: float32 tiles that the rule needs.
    """
    width = sum(head_dims)

    def needed(blocks):
        rows = blocks.query * (width * (itemsize * 2 + 4) + 2 * 3 * 4 * LANES)
        keys = blocks.key * width * itemsize * 2
        tiles = (_FORWARD_TILES + rule_tiles) * 4 + 2 * dense_bytes
        return rows + keys + blocks.query * blocks.key * tiles

    return config.value.forward or _shrunk(_preferred(_FORWARD_BLOCKS, head_dims), needed)


def backward_blocks(
    head_dims: tuple[int, int], itemsize: int, dense_bytes: int, rule_tiles: int
) -> BlockSizes:
    """Blocks of the backward kernels; half of the memory is left to the gradient of the queries."""
    width = sum(head_dims)

    def needed(blocks):
        sides = (blocks.query + 2 * blocks.key) * width * itemsize * 2 + blocks.key * width * 4
        tiles = (_BACKWARD_TILES + rule_tiles) * 4 + 2 * dense_bytes
        return 2 * sides + blocks.query * blocks.key * tiles

    return config.value.backward or _shrunk(_preferred(_BACKWARD_BLOCKS, head_dims), needed)


_LARGE, _SMALL = BlockSizes(1024, 1024), BlockSizes(512, 512)
# The best blocks for head dims up to the given one, by kind of chip; None is any other. Of 512 and 1024, by the
# instructions that the compiled kernels issue; those of 7x are v5p's, whose vector memory is as large.
_FORWARD_BLOCKS = {
    "v5e": {256: _LARGE},
    "v5p": {256: _LARGE},
    "v6e": {256: _LARGE},
    "7x": {256: _LARGE},
    None: {256: _SMALL},
}
_BACKWARD_BLOCKS = {
    "v5e": {128: _LARGE, 256: _SMALL},
    "v5p": {256: _LARGE},
    "v6e": {256: _LARGE},
    "7x": {256: _LARGE},
    None: {256: _SMALL},
}
# Float32 tiles that are alive at once besides those of the rule, by what compiled.
_FORWARD_TILES = 2
_BACKWARD_TILES = 2


def _preferred(table, head_dims):
    try:
        chip = pltpu.get_tpu_info().chip_version.value
    except ValueError:
        chip = None
    by_head_dim = table.get(chip, table[None])
    wide_enough = [head_dim for head_dim in by_head_dim if head_dim >= max(head_dims)]
    return by_head_dim[min(wide_enough, default=max(by_head_dim))]


def _shrunk(blocks, needed):
    while needed(blocks) > vmem_bytes() and max(blocks.query, blocks.key) > LANES:
        if blocks.query >= blocks.key:
            blocks = replace(blocks, query=blocks.query // 2)
        else:
            blocks = replace(blocks, key=blocks.key // 2)
    return blocks


def _capacity():
    try:
        return pltpu.get_tpu_info().vmem_capacity_bytes
    except ValueError:  # no TPU here, and no abstract device in the context
        return _SMALLEST_VMEM
