"""Where measurements get attention from: what a model's heads compute on a text, one layer at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@dataclasses.dataclass(frozen=True)
class Attention:
    """What the heads of one layer computed on one text of T = S tokens; T queries, S keys, N heads.

    Every head has values of its own: shared ones (grouped queries) are repeated.
    """

    name: str  # of the layer, for tables and figures
    layer: int
    is_causal: bool  # whether query i sees only the keys j <= i; otherwise all of them
    scale: float
    logits: Float[Array, "N T S"]  # scaled and capped, before any is hidden
    values: Float[Array, "N S Hv"]
    inputs: Mapping[str, Float[Array, "S D"]]  # "embedding": of the tokens; "layer_input": what the layer got


class Source(Protocol):
    """A model, or something that stands in for one."""

    @property
    def name(self) -> str: ...

    @property
    def max_length(self) -> int:
        """Of a text, in tokens."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def is_causal(self) -> bool: ...

    def tokenize(self, text: str, /) -> Int[np.ndarray, "T"]:
        """The ids of the whole text, however long it is."""

    def example_tokens(self, length: int, count: int, /) -> Int[np.ndarray, "M T"]:
        """Inputs of the kind that the model is for, the same every time."""

    def layers(self, tokens: Int[np.ndarray, "T"]) -> Iterator[Attention]:
        """See :func:`attentions`, which checks tokens and logits."""


def attentions(source: Source, tokens: Int[Array | np.ndarray, "T"]) -> Iterator[Attention]:
    """The layers of a source on one text, one after the other, so that memory is that of one layer.

    Args:
      source: the result of :func:`attnorm.analysis.sources.load`.
      tokens: from 2 to ``source.max_length`` ids, as :meth:`Source.tokenize` gives them.

    Raises:
      TypeError: tokens are not integers.
      ValueError: another shape, too few or too many tokens, or ids that the model does not know.
      FloatingPointError: logits that are not finite; the message names the layer.
    """
    ids = np.asarray(tokens)
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"tokens must be integers, got {ids.dtype}")
    if ids.ndim != 1 or not 2 <= ids.size <= source.max_length:
        raise ValueError(
            f"tokens must be one text of 2 to {source.max_length} ids for {source.name}, got shape {ids.shape}"
        )
    unknown = ids[(ids < 0) | (ids >= source.vocab_size)]
    if unknown.size:
        raise ValueError(
            f"tokens must be ids from 0 to {source.vocab_size - 1} for {source.name}, got {unknown[0]}"
        )
    return _finite(source, ids)


def _finite(source, tokens):
    for attention in source.layers(tokens):
        if not bool(jnp.all(jnp.isfinite(attention.logits))):
            raise FloatingPointError(f"logits of {attention.name} of {source.name} are not finite")
        yield attention


def excerpts(source: Source, text: str, length: int, count: int = 1) -> Int[np.ndarray, "M T"]:
    """The first ``count`` pieces of ``length`` tokens of a text, one after the other.

    Raises:
      ValueError: the source takes no texts of that length, or the text has too few tokens.
    """
    if not 2 <= length <= source.max_length:
        raise ValueError(f"length must be in 2..{source.max_length} for {source.name}, got {length}")
    ids = source.tokenize(text)
    if len(ids) < length * count:
        raise ValueError(
            f"text must have at least {count} x {length} = {count * length} tokens, got one of {len(ids)}"
        )
    return ids[: length * count].reshape(count, length)


def scaled_logits(
    query: Float[Array, "N T H"], key: Float[Array, "N S H"], scale: float
) -> Float[Array, "N T S"]:
    """``scale <q_i, k_j>`` for all pairs, in full precision on every device."""
    return scale * jnp.einsum("NTH,NSH->NTS", query, key, precision="highest")
