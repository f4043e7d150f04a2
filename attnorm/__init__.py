"""attnorm: how attention normalises its weights. See the README for an overview."""

from attnorm import normalizers
from attnorm.attention import attention_weights, dot_product_attention
from attnorm.context import ring_attention
from attnorm.normalizers import *  # noqa: F403
from attnorm.sharding import sharded

# Every normaliser is a public function by its name, wherever it is defined.
__all__ = ["attention_weights", "dot_product_attention", "ring_attention", "sharded", *normalizers.__all__]
