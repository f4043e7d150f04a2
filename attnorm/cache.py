"""Keys and values of the tokens so far, of all layers, in arrays whose shapes do not grow."""

from __future__ import annotations

import numbers
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """What :func:`make_cache` makes: a pytree, to be donated to the compiled function that returns the next one.

    Letters: L layers, B batch, S slots, K key heads, H and Hv head dims. The token at position p of a row has slot p,
    or with a window slot p mod S, where it replaces one that no query can see any more. Slots without a token hold
    numbers without meaning.

    Attributes:
      key: (L, B, S, K, H).
      value: (L, B, S, K, Hv).
      lengths: (B,), how many tokens each row has had.
      window: None, or how many keys before its own a query sees.
      max_length: how many tokens a row may have, None for any number.
    """

    key: Float[Array, "L B S K H"]
    value: Float[Array, "L B S K Hv"]
    lengths: Int[Array, "B"]
    window: int | None = field(default=None, metadata=dict(static=True))
    max_length: int | None = field(default=None, metadata=dict(static=True))

    @property
    def num_slots(self) -> int:
        return self.key.shape[2]

    @property
    def longest_chunk(self) -> int:
        """How many tokens can be appended at once: with a window, the first of them still needs the keys in it."""
        return self.num_slots - (self.window or 0)

    def append(
        self,
        layer: int | Int[Array, ""],
        key: Float[Array, "B T K H"],
        value: Float[Array, "B T K Hv"],
        num_tokens: Int[Array, "B"] | None = None,
    ) -> Cache:
        """The cache with keys and values of new tokens in one layer; ``lengths`` are as before until :meth:`advance`.

        Of each row the first ``num_tokens`` are stored, by default all, except those for which there is no slot.
        """
        new = jnp.arange(key.shape[1])
        positions = self.lengths[:, None] + new
        slots = positions if self.window is None else positions % self.num_slots
        if num_tokens is not None:
            slots = jnp.where(new < num_tokens[:, None], slots, self.num_slots)
        rows = jnp.arange(key.shape[0])[:, None]

        def store(slots_of_all, x):
            return slots_of_all.at[layer, rows, slots].set(x.astype(slots_of_all.dtype), mode="drop")

        return replace(self, key=store(self.key, key), value=store(self.value, value))

    def advance(self, num_tokens: int | Int[Array, "B"]) -> Cache:
        """The cache after so many more tokens of each row, which every layer has appended."""
        return replace(self, lengths=self.lengths + num_tokens)

    def check_room(self, num_tokens: int | Int[Array, "B"], chunk: int) -> None:
        """Raises a ValueError where that many more tokens, appended ``chunk`` at once, do not fit.

        Lengths that are being traced cannot be checked. A token for which there is no slot is then not stored, and
        it and those after it see the tokens that are: wrong from there on, but finite, and ``lengths`` tell.
        """
        if chunk > self.longest_chunk:
            window = "" if self.window is None else f" with a window of {self.window}"
            raise ValueError(
                f"tokens: at most {self.longest_chunk} can be appended at once to a cache of {self.num_slots} slots"
                f"{window}, got {chunk}"
            )
        if self.max_length is None or not all(is_known(x) for x in (self.lengths, num_tokens)):
            return
        lengths = np.asarray(self.lengths) + np.asarray(num_tokens)
        if lengths.size and lengths.max() > self.max_length:
            row = int(lengths.argmax())
            raise ValueError(
                f"cache: rows may have max_length = {self.max_length} tokens, row {row} has "
                f"{int(self.lengths[row])} and would have {int(lengths[row])}"
            )


def make_cache(
    *,
    num_layers: int,
    batch_size: int,
    num_slots: int,
    num_key_value_heads: int,
    head_dim: int,
    value_head_dim: int | None = None,
    dtype: jax.typing.DTypeLike = jnp.float32,
    window: int | None = None,
    max_length: int | None = None,
) -> Cache:
    """An empty cache.

    Args:
      num_layers, batch_size, num_key_value_heads, head_dim: L, B, K and H.
      num_slots: S. Without a window the most tokens that a row can have; with one, more than it: the rest is how many
        tokens can be appended at once.
      value_head_dim: Hv, by default H.
      dtype: of queries, keys and values.
      window: every query sees the key of its own token and at most that many before it; by default, all.
      max_length: how many tokens a row may have; by default ``num_slots``, and with a window any number.

    Raises:
      TypeError: a size that is no whole number.
      ValueError: a size that is out of range.

    >>> from attnorm import make_cache
    >>> cache = make_cache(num_layers=2, batch_size=3, num_slots=100, num_key_value_heads=4, head_dim=16)
    >>> cache.key.shape
    (2, 3, 100, 4, 16)
    """
    value_head_dim = head_dim if value_head_dim is None else value_head_dim
    sizes = dict(
        num_layers=num_layers,
        batch_size=batch_size,
        num_slots=num_slots,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        value_head_dim=value_head_dim,
    )
    for name, size in sizes.items():
        require_whole(name, size, 1)
    if window is not None:
        require_whole("window", window, 0)
        if num_slots <= window:
            raise ValueError(f"num_slots must be greater than window = {window}, got {num_slots}")
    elif max_length is None:
        max_length = num_slots
    if max_length is not None:
        require_whole("max_length", max_length, 1)
        if window is None and max_length > num_slots:
            raise ValueError(
                f"max_length must be at most num_slots = {num_slots} without a window, got {max_length}"
            )
    slots = (num_layers, batch_size, num_slots, num_key_value_heads)
    return Cache(
        key=jnp.zeros((*slots, head_dim), dtype),
        value=jnp.zeros((*slots, value_head_dim), dtype),
        lengths=jnp.zeros(batch_size, jnp.int32),
        window=window,
        max_length=max_length,
    )


def is_known(x: int | Array | np.ndarray) -> bool:
    """Whether the values are at hand, and not traced or on other hosts."""
    return not isinstance(x, jax.core.Tracer) and (not isinstance(x, jax.Array) or x.is_fully_addressable)


def require_whole(name: str, value: int, least: int) -> None:
    """Raises the error that names a size which is no whole number, or less than the least."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_vocabulary(
    name: str, tokens: Int[Array, "B T"], counts: Int[Array | np.ndarray, "B"], vocab_size: int
) -> None:
    """An error that names tokens that are none, as far as they are known; those after a row's number may be any."""
    if not (is_known(tokens) and is_known(counts)):
        return
    ids = np.asarray(tokens)
    counted = np.arange(ids.shape[1]) < np.asarray(counts)[:, None]
    wrong = ids[counted & ((ids < 0) | (ids >= vocab_size))]
    if wrong.size:
        raise ValueError(
            f"{name} must be from 0 to {vocab_size - 1}, of a vocabulary of {vocab_size}, got {wrong[0]}"
        )


def checked_counts(
    name: str, counts: Int[Array | np.ndarray, "B"], batch_size: int, least: int, most: int
) -> Int[Array, "B"]:
    """Numbers of tokens, one for each row, in int32; an error names them where they are anything else."""
    counts = counts if isinstance(counts, jax.Array) else np.asarray(counts)
    if not jnp.issubdtype(counts.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got {counts.dtype}")
    if counts.shape != (batch_size,):
        raise ValueError(f"{name} must have shape (B,) = ({batch_size},), got {counts.shape}")
    if is_known(counts) and not np.all((least <= np.asarray(counts)) & (np.asarray(counts) <= most)):
        raise ValueError(f"{name} must be from {least} to {most}, got {np.asarray(counts).tolist()}")
    return jnp.asarray(counts, jnp.int32)
