"""How a length is cut into tiles."""

from __future__ import annotations


def round_up(x: int, unit: int) -> int:
    """The smallest multiple of ``unit`` from x on."""
    return -(-x // unit) * unit


def even_block(length: int, largest: int, unit: int) -> int:
    """The size of equal tiles, so that the last one is not mostly padding: a multiple of ``unit``, or the largest.

    >>> from attnorm.tiling import even_block
    >>> even_block(1100, largest=512, unit=128)
    384
    """
    size = -(-length // -(-length // largest))
    return min(largest, round_up(size, unit))
