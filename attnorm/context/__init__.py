"""Attention over a sequence that is split over devices."""

from attnorm.context.attention import ring_attention
from attnorm.context.order import unzigzag, zigzag

__all__ = ["ring_attention", "unzigzag", "zigzag"]
