"""How a sequence is cut into blocks and spread over devices.

In ordinary order the d-th of n devices holds the d-th block. Under a causal mask the last of them would have
nearly twice the average work and all others would wait for it; so there the sequence is cut into 2n blocks,
and device d holds blocks d and 2n - 1 - d, which together see as many keys on every device: the zigzag order.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def zigzag(x: Array, num_devices: int, axis: int = 1) -> Array:
    """The sequence in zigzag order: of 2n blocks, 0 and 2n - 1 come first, then 1 and 2n - 2, and so on.

    To reorder tokens once, before a model that calls ``attnorm.ring_attention(..., order="zigzag")``.
    Whatever in it depends on positions, such as rotary embeddings, has to be given those of this order:
    ``zigzag(jnp.arange(T), n, axis=0)``.

    Args:
      x: an array, of tokens, positions, segment ids.
      num_devices: n, of the context axis; 2n divides the length.
      axis: the sequence's axis.

    Raises:
      ValueError: a length that 2n does not divide.

    >>> import jax.numpy as jnp
    >>> from attnorm.context import zigzag
    >>> print(zigzag(jnp.arange(8), 2, axis=0))
    [0 1 6 7 2 3 4 5]
    """
    return _take_blocks(x, num_devices, axis, _zigzag_blocks(num_devices))


def unzigzag(x: Array, num_devices: int, axis: int = 1) -> Array:
    """The sequence in ordinary order again: the inverse of :func:`zigzag`, with its arguments and errors.

    >>> import jax.numpy as jnp
    >>> from attnorm.context import unzigzag, zigzag
    >>> print(unzigzag(zigzag(jnp.arange(8), 2, axis=0), 2, axis=0))
    [0 1 2 3 4 5 6 7]
    """
    blocks = _zigzag_blocks(num_devices)
    return _take_blocks(x, num_devices, axis, sorted(range(len(blocks)), key=blocks.__getitem__))


def _zigzag_blocks(num_devices):
    return [block for d in range(num_devices) for block in (d, 2 * num_devices - 1 - d)]


def _take_blocks(x, num_devices, axis, blocks):
    length = x.shape[axis]
    if length % len(blocks):
        raise ValueError(
            f"x must have a length that 2 * num_devices = {len(blocks)} divides, got {length} "
            f"along axis {axis}"
        )
    x = jnp.moveaxis(x, axis, 0)
    cut = x.reshape(len(blocks), length // len(blocks), *x.shape[1:])
    return jnp.moveaxis(cut[jnp.array(blocks)].reshape(x.shape), 0, axis)


@dataclass(frozen=True)
class Order:
    """Which blocks each device along a mesh axis holds. Its arrays are (blocks, B, length, ...)."""

    axis: str
    num_devices: int
    is_zigzag: bool

    @property
    def num_blocks(self) -> int:
        """Of one device."""
        return 2 if self.is_zigzag else 1

    def block(self, device: int | Array, which: int | Array) -> int | Int[Array, ""]:
        """The number, in the sequence, of one of a device's blocks."""
        if not self.is_zigzag:
            return device
        return jnp.where(which == 0, device, 2 * self.num_devices - 1 - device)

    def split(self, x: Array) -> Array:
        """(B, L, ...) -> (blocks, B, L / blocks, ...)."""
        B, L = x.shape[:2]
        return jnp.moveaxis(x.reshape(B, self.num_blocks, L // self.num_blocks, *x.shape[2:]), 1, 0)

    def join(self, x: Array) -> Array:
        """(blocks, B, l, ...) -> (B, blocks l, ...)."""
        _, B, size = x.shape[:3]
        return jnp.moveaxis(x, 0, 1).reshape(B, self.num_blocks * size, *x.shape[3:])

    def all_blocks(self, x: Array) -> Array:
        """(blocks, B, l, ...) of every device -> (B, L, ...), the whole sequence in ordinary order."""
        x = jax.lax.all_gather(x, self.axis, axis=0, tiled=True)
        if self.is_zigzag:
            blocks = _zigzag_blocks(self.num_devices)
            x = x[jnp.array(sorted(range(len(blocks)), key=blocks.__getitem__))]
        _, B, size = x.shape[:3]
        return jnp.moveaxis(x, 0, 1).reshape(B, -1, *x.shape[3:])

    def from_ordinary(self, x: Array) -> Array:
        """A device's blocks 2d and 2d + 1 -> those of zigzag order: again one even, one odd."""
        even, odd = (
            jax.lax.ppermute(x[parity], self.axis, [(d, self._holder(2 * d + parity)) for d in self._devices])
            for parity in (0, 1)
        )
        return self._swapped_on_odd(even, odd)

    def to_ordinary(self, x: Array) -> Array:
        """The inverse of :meth:`from_ordinary`."""
        blocks = self._swapped_on_odd(x[0], x[1])
        back = (
            jax.lax.ppermute(
                blocks[parity], self.axis, [(self._holder(2 * d + parity), d) for d in self._devices]
            )
            for parity in (0, 1)
        )
        return jnp.stack(list(back))

    @property
    def _devices(self):
        return range(self.num_devices)

    def _holder(self, block):
        return min(block, 2 * self.num_devices - 1 - block)

    def _swapped_on_odd(self, a, b):
        """Block d, the first of device d, is even where d is."""
        is_odd = jax.lax.axis_index(self.axis) % 2 == 1
        return jnp.stack([jnp.where(is_odd, b, a), jnp.where(is_odd, a, b)])
