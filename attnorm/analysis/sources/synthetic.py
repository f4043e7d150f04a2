"""Heads with known weights, to see that a measurement measures what it should."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from attnorm.analysis.sources.source import Attention, excerpts, scaled_logits
from attnorm.data.text import english
from attnorm.data.tokenizers import ByteTokenizer


class Synthetic:
    """One layer of four causal heads whose softmax weights are known in closed form.

    With query i and key j: "uniform", all logits 0; "sink", logit :data:`SINK` at key 0 and 0 elsewhere;
    "recency", logit ``-(i - j)``, hence geometric weights; "random", i.i.d. standard normal queries and keys.
    Tokens are bytes; embeddings, and values alike, are fixed random unit vectors.
    """

    name = "synthetic"
    max_length = 8192
    vocab_size = 256
    is_causal = True
    heads = ("uniform", "sink", "recency", "random")
    SINK = 4.0
    HEAD_DIM = 16

    def tokenize(self, text: str) -> Int[np.ndarray, "T"]:
        return ByteTokenizer().encode(text)

    def example_tokens(self, length: int, count: int) -> Int[np.ndarray, "M T"]:
        return excerpts(self, english(), length, count)

    def layers(self, tokens: Int[np.ndarray, "T"]) -> Iterator[Attention]:
        T, H = len(tokens), self.HEAD_DIM
        scale = H**-0.5
        table_key, query_key, key_key = jax.random.split(jax.random.key(0), 3)
        table = jax.random.normal(table_key, (256, H))
        embedding = (table / jnp.linalg.norm(table, axis=-1, keepdims=True))[jnp.asarray(tokens)]

        position = jnp.arange(T, dtype=jnp.float32)
        one, zero = jnp.ones(T), jnp.zeros((T, H))
        is_first = (position == 0).astype(jnp.float32)
        queries = {
            "uniform": zero,
            "sink": zero.at[:, 0].set(self.SINK / scale),
            "recency": zero.at[:, 0].set(one / scale).at[:, 1].set(-position / scale),
            "random": jax.random.normal(query_key, (T, H)),
        }
        keys = {
            "uniform": zero,
            "sink": zero.at[:, 0].set(is_first),
            "recency": zero.at[:, 0].set(position).at[:, 1].set(one),
            "random": jax.random.normal(key_key, (T, H)),
        }
        query_NxTxH, key_NxSxH = (jnp.stack([x[head] for head in self.heads]) for x in (queries, keys))
        yield Attention(
            name=self.name,
            layer=0,
            is_causal=self.is_causal,
            scale=scale,
            logits=scaled_logits(query_NxTxH, key_NxSxH, scale),
            values=jnp.broadcast_to(embedding, (len(self.heads), T, H)),
            inputs={"embedding": embedding, "layer_input": embedding},
        )
