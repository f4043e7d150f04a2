"""How attention weights are normalised: pure functions, their one-pass rules, and a registry of names."""

from attnorm.normalizers.constant import sink, softmax_plus_n
from attnorm.normalizers.lp import l2, linf, lp, softmax
from attnorm.normalizers.registry import get_normalizer, normalizer_names
from attnorm.normalizers.rule import Normalizer

__all__ = [
    "Normalizer",
    "get_normalizer",
    "l2",
    "linf",
    "lp",
    "normalizer_names",
    "sink",
    "softmax",
    "softmax_plus_n",
]
