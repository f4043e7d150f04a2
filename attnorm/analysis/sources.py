"""Where measurements get attention from: what a model's heads compute on a text, one layer at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Attention:
    """What the heads of one layer computed on one text of T = S tokens; T queries, S keys, N heads.

    Every head has keys and values of its own: shared ones (grouped queries) are repeated.
    """

    name: str  # of the layer, for tables and figures
    layer: int
    is_causal: bool  # whether query i sees only the keys j <= i; otherwise all of them
    scale: float
    logits: Float[
        Array, "N T S"
    ]  # as the normaliser gets them: scaled, capped, biased; hidden pairs included
    queries: Float[Array, "N T H"]
    keys: Float[Array, "N S H"]
    values: Float[Array, "N S Hv"]
    inputs: Mapping[str, Float[Array, "S D"]]  # "embedding": of the tokens; "layer_input": what the layer got


class Source(Protocol):
    """A model, or something that stands in for one."""

    name: str
    max_length: int  # of a text, in tokens
    is_causal: bool

    def tokenize(self, text: str) -> Int[np.ndarray, "T"]:
        """The ids of the whole text, however long it is."""

    def layers(self, tokens: Int[Array, "T"]) -> Iterator[Attention]:
        """See :func:`attentions`."""


def load(model: str) -> Source:
    """The source of that name.

    Args:
      model: ``"synthetic"``, heads with known weights (:class:`Synthetic`).

    Raises:
      ValueError: there is no such model.

    >>> from attnorm.analysis import sources
    >>> source = sources.load("synthetic")
    >>> [attention.name for attention in sources.attentions(source, source.tokenize("A text."))]
    ['synthetic']
    """
    if model == "synthetic":
        return Synthetic()
    raise ValueError(f"model must be 'synthetic', got {model!r}")


def attentions(source: Source, tokens: Int[Array, "T"]) -> Iterator[Attention]:
    """The layers of a source on one text, one after the other, so that memory is that of one layer.

    Args:
      source: the result of :func:`load`.
      tokens: from 2 to ``source.max_length`` ids, as :meth:`Source.tokenize` gives them.

    Raises:
      TypeError: tokens are not integers.
      ValueError: another shape, or too few or too many tokens.
      FloatingPointError: logits that are not finite; the message names the layer.
    """
    tokens = np.asarray(tokens)
    if not np.issubdtype(tokens.dtype, np.integer):
        raise TypeError(f"tokens must be integers, got {tokens.dtype}")
    if tokens.ndim != 1 or not 2 <= tokens.size <= source.max_length:
        raise ValueError(
            f"tokens must be one text of 2 to {source.max_length} ids for {source.name}, got shape {tokens.shape}"
        )
    return _finite(source, tokens)


def _finite(source, tokens):
    for attention in source.layers(tokens):
        if not bool(jnp.all(jnp.isfinite(attention.logits))):
            raise FloatingPointError(f"logits of {attention.name} of {source.name} are not finite")
        yield attention


class Synthetic:
    """One layer of four causal heads whose softmax weights are known in closed form.

    With query i and key j: "uniform", all logits 0; "sink", logit :data:`SINK` at key 0 and 0 elsewhere;
    "recency", logit ``-(i - j)``, hence geometric weights; "random", i.i.d. standard normal queries and keys.
    Tokens are bytes; embeddings, and values alike, are fixed random unit vectors.
    """

    name = "synthetic"
    max_length = 8192
    is_causal = True
    heads = ("uniform", "sink", "recency", "random")
    SINK = 4.0
    HEAD_DIM = 16

    def tokenize(self, text: str) -> Int[np.ndarray, "T"]:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def layers(self, tokens: Int[Array, "T"]) -> Iterator[Attention]:
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
            logits=_logits(query_NxTxH, key_NxSxH, scale),
            queries=query_NxTxH,
            keys=key_NxSxH,
            values=jnp.broadcast_to(embedding, (len(self.heads), T, H)),
            inputs={"embedding": embedding, "layer_input": embedding},
        )


def _logits(query_NxTxH, key_NxSxH, scale):
    return scale * jnp.einsum("NTH,NSH->NTS", query_NxTxH, key_NxSxH, precision="highest")
