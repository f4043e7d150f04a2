"""attnorm: how attention normalises its weights. See the README for an overview."""

from attnorm.attention import attention_weights, dot_product_attention
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
from attnorm.sharding import sharded

__all__ = [
    "Normalizer",
    "attention_weights",
    "dot_product_attention",
    "get_normalizer",
    "l2",
    "linf",
    "lp",
    "normalizer_names",
    "sharded",
    "sink",
    "softmax",
    "softmax_plus_n",
]
