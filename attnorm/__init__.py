"""attnorm: how attention normalises its weights. See the README for an overview."""

from attnorm.normalizers import (
    Normalizer,
    get_normalizer,
    l2,
    linf,
    lp,
    normalizer_names,
    sink,
    softmax,
    softmax_plus_n,
)

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
