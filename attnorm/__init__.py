"""attnorm: how attention normalises its weights. See the README for an overview."""

from attnorm import normalizers
from attnorm.attention import attention_weights, dot_product_attention
from attnorm.cache import Cache, make_cache
from attnorm.context import ring_attention
from attnorm.decoding import split_attention, windowed_attention
from attnorm.generation import generate
from attnorm.normalizers import *  # noqa: F403
from attnorm.sharding import sharded

# Every normaliser is a public function by its name, wherever it is defined.
__all__ = [
    "Cache",
    "attention_weights",
    "dot_product_attention",
    "generate",
    "make_cache",
    "ring_attention",
    "sharded",
    "split_attention",
    "windowed_attention",
    *normalizers.__all__,
]
