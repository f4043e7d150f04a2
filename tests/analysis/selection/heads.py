"""A source whose heads have the logits and vectors that a test wants."""

import jax.numpy as jnp
import numpy as np

from attnorm.analysis.sources import Attention


class Given:
    """One layer of given logits (N, T, S); shorter texts take its beginning. Tokens are positions."""

    name = "given"
    vocab_size = 10**6

    def __init__(self, logits, x, values=None, is_causal=False, scale=1.0):
        self.logits, self.x, self.is_causal, self.scale = logits, x, is_causal, scale
        self.values = np.broadcast_to(x, (len(logits), *x.shape)) if values is None else values
        self.max_length = logits.shape[-1]
        self.passes = 0

    def tokenize(self, text):
        return np.arange(len(text))

    def example_tokens(self, length, count):
        return np.tile(np.arange(length), (count, 1))

    def layers(self, tokens):
        self.passes += 1
        L = len(tokens)
        yield Attention(
            name="only",
            layer=0,
            is_causal=self.is_causal,
            scale=self.scale,
            logits=jnp.asarray(self.logits[:, :L, :L], jnp.float32),
            values=jnp.asarray(self.values[:, :L], jnp.float32),
            inputs={name: jnp.asarray(self.x[:L], jnp.float32) for name in ("embedding", "layer_input")},
        )
