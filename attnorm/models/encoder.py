"""A bidirectional encoder with BERT's features: every token sees every other."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from attnorm.models.fields import require_types
from attnorm.models.gpt import AttentionFn
from attnorm.models.stack import make_stack, run_stack


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """An encoder.

    Raises:
      TypeError: a field of another type, by name.
      ValueError: a size that is not positive, or features that num_heads does not divide.
    """

    vocab_size: int
    max_length: int
    num_layers: int
    num_heads: int
    features: int
    mlp_features: int
    norm_eps: float = 1e-12
    num_token_types: int = 2

    def __post_init__(self):
        require_types(self)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not value > 0:
                raise ValueError(f"{field.name} must be > 0, got {value!r}")
        if self.features % self.num_heads:
            raise ValueError(
                f"features must be a multiple of num_heads = {self.num_heads}, got {self.features}"
            )


class EncoderAttention(nnx.Module):
    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        features = config.features
        self.query = nnx.Linear(features, features, rngs=rngs)
        self.key = nnx.Linear(features, features, rngs=rngs)
        self.value = nnx.Linear(features, features, rngs=rngs)
        self.project = nnx.Linear(features, features, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], attention_fn: AttentionFn) -> Float[Array, "B T D"]:
        query, key, value = (
            linear(x).reshape(*x.shape[:2], self.num_heads, -1)
            for linear in (self.query, self.key, self.value)
        )
        out = attention_fn(query, key, value, scale=query.shape[-1] ** -0.5, logits_soft_cap=None)
        return self.project(out.reshape(x.shape))


class EncoderBlock(nnx.Module):
    """``x = norm(x + attention(x))``, then ``norm(x + mlp(x))``."""

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.attention = EncoderAttention(config, rngs=rngs)
        self.attention_norm = _norm(config, rngs)
        self.enter = nnx.Linear(config.features, config.mlp_features, rngs=rngs)
        self.leave = nnx.Linear(config.mlp_features, config.features, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)

    def __call__(
        self, x: Float[Array, "B T D"], attention_fn: AttentionFn, positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        del positions  # they are in the embedding alone
        x = self.attention_norm(x + self.attention(x, attention_fn))
        return self.mlp_norm(x + self.leave(jax.nn.gelu(self.enter(x), approximate=False)))


class Encoder(nnx.Module):
    """Maps tokens to features that depend on all of them.

    >>> import functools, jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> import attnorm
    >>> from attnorm.models.encoder import Encoder, EncoderConfig
    >>> config = EncoderConfig(vocab_size=64, max_length=8, num_layers=1, num_heads=2, features=8, mlp_features=16)
    >>> model = Encoder(config, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((3, 5), int), functools.partial(attnorm.dot_product_attention, normalizer="softmax")).shape
    (3, 5, 8)
    """

    def __init__(self, config: EncoderConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.token_embedding = nnx.Embed(config.vocab_size, config.features, rngs=rngs)
        self.position_embedding = nnx.Embed(config.max_length, config.features, rngs=rngs)
        self.type_embedding = nnx.Embed(config.num_token_types, config.features, rngs=rngs)
        self.norm = _norm(config, rngs)
        self.blocks = make_stack(lambda rngs: EncoderBlock(config, rngs=rngs), config.num_layers, rngs)

    def __call__(self, tokens: Int[Array, "B T"], attention_fn: AttentionFn) -> Float[Array, "B T D"]:
        """The features of each token, all of type 0.

        Args:
          tokens: ids.
          attention_fn: called as ``attention_fn(query, key, value, scale=..., logits_soft_cap=None)``, not causal.

        Raises:
          ValueError: more tokens than positions.
        """
        positions = self.positions_of(tokens)
        return run_stack(
            self.blocks,
            lambda block, x: block(x, attention_fn, positions),
            self.embed(tokens, positions),
            scan=True,
            remat="none",
        )

    def positions_of(self, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """0, 1, ... in every row."""
        length = tokens.shape[1]
        if length > self.config.max_length:
            raise ValueError(
                f"tokens must have at most max_length = {self.config.max_length} positions, got {length}"
            )
        return jnp.broadcast_to(jnp.arange(length), tokens.shape)

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The input of the first block."""
        types = jnp.zeros_like(tokens)
        x = self.token_embedding(tokens) + self.position_embedding(positions) + self.type_embedding(types)
        return self.norm(x)


def _norm(config: EncoderConfig, rngs: nnx.Rngs) -> nnx.LayerNorm:
    return nnx.LayerNorm(config.features, epsilon=config.norm_eps, use_fast_variance=False, rngs=rngs)
