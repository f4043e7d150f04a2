"""The transformer of the counting experiment: parallel blocks, no position encoding but "is this position 0"."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

NORMS = ("layer", "batch")

Heads = Float[Array, "B T N H"]
AttentionFn = Callable[[Heads, Heads, Heads], Heads]


class FrequencyScaledEmbedding(nnx.Module):
    """An embedding where the gradient of a token's row is divided by the token's frequency in the batch."""

    def __init__(self, vocab_size: int, features: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(0.25 / math.sqrt(features))
        self.table = nnx.Param(init(rngs.params(), (vocab_size, features)))

    def __call__(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        table = self.table[...]
        count = jnp.zeros(table.shape[0]).at[tokens].add(1.0)
        scale = tokens.size / jnp.maximum(count, 1.0)
        constant = jax.lax.stop_gradient(table)
        # The difference is exactly 0: the scale reaches the gradient only.
        return (constant + (table - constant) * scale[:, None])[tokens]


class ParallelBlock(nnx.Module):
    """``x + W_out [gelu(pre) ‖ attention(q, k, v)]``, with q, k, v and pre from one linear map of norm(x)."""

    def __init__(self, features: int, num_heads: int, norm: str, *, rngs: nnx.Rngs):
        self.num_heads = num_heads
        self.norm = _make_norm(norm, features, rngs)
        self.project_in = nnx.Linear(features, 4 * features, rngs=rngs)
        self.project_out = nnx.Linear(2 * features, features, use_bias=False, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], attention_fn: AttentionFn) -> Float[Array, "B T D"]:
        *qkv, pre = jnp.split(self.project_in(self.norm(x)), 4, axis=-1)
        query, key, value = (y.reshape(*y.shape[:-1], self.num_heads, -1) for y in qkv)
        attended = attention_fn(query, key, value).reshape(x.shape)
        return x + self.project_out(jnp.concatenate([nnx.gelu(pre, approximate=True), attended], axis=-1))


class CountingTransformer(nnx.Module):
    """Predicts a number at each position.

    Args:
      vocab_size: number of symbols.
      features, num_heads, num_blocks: D, N and the depth; N divides D.
      norm: "layer", or "batch" (over batch and length, with running statistics in evaluation mode).
      rngs: with a "params" stream.

    Raises:
      ValueError: an unknown norm, or features that num_heads does not divide.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attnorm.models.counting import CountingTransformer
    >>> model = CountingTransformer(16, features=8, num_heads=2, num_blocks=1, norm="layer", rngs=nnx.Rngs(0))
    >>> attention_fn = lambda query, key, value: jax.nn.dot_product_attention(query, key, value, is_causal=True)
    >>> model(jnp.zeros((3, 5), int), attention_fn).shape
    (3, 5)
    """

    def __init__(
        self, vocab_size: int, *, features: int, num_heads: int, num_blocks: int, norm: str, rngs: nnx.Rngs
    ):
        if features % num_heads:
            raise ValueError(f"features must be a multiple of num_heads, got {features} and {num_heads}")
        self.token_embedding = FrequencyScaledEmbedding(vocab_size, features, rngs=rngs)
        init = nnx.initializers.normal(0.25 / math.sqrt(features))
        self.first_embedding = nnx.Embed(2, features, embedding_init=init, rngs=rngs)
        self.blocks = nnx.List(
            [ParallelBlock(features, num_heads, norm, rngs=rngs) for _ in range(num_blocks)]
        )
        self.norm = _make_norm(norm, features, rngs)
        head_init = nnx.initializers.normal(0.5 / math.sqrt(features))
        self.head = nnx.Linear(features, 1, kernel_init=head_init, rngs=rngs)

    def __call__(self, tokens: Int[Array, "B T"], attention_fn: AttentionFn) -> Float[Array, "B T"]:
        """The predictions; ``attention_fn(query, key, value)`` must be causal."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, attention_fn)
        return self.head(self.norm(x))[..., 0]

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The input of the first block."""
        is_first = (jnp.arange(tokens.shape[1]) == 0).astype(jnp.int32)
        return self.token_embedding(tokens) + self.first_embedding(is_first)


def _make_norm(norm: str, features: int, rngs: nnx.Rngs) -> nnx.Module:
    if norm not in NORMS:
        raise ValueError(f"norm must be one of {', '.join(NORMS)}, got {norm!r}")
    return (nnx.LayerNorm if norm == "layer" else nnx.BatchNorm)(features, rngs=rngs)
