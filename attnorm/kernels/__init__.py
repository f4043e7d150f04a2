"""Fused attention kernels in Pallas, written once against the one-pass rule of a normaliser."""

from attnorm.kernels.settings import BlockSizes, Config, config

__all__ = ["BlockSizes", "Config", "config"]
