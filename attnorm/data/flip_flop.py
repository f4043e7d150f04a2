"""Flip-flop: one bit of memory, written, read, and to be kept in between."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PRNGKeyArray

from attnorm.data.questions import Questions

WRITE, READ, IGNORE, ZERO, ONE = range(5)
VOCAB_SIZE = 5


def flip_flop_batch(key: PRNGKeyArray, batch_size: int, length: int, *, ignore: float = 0.8) -> Questions:
    """Instructions, each followed by a bit; the bit after a read is that of the last write, the others are random.

    The first instruction is a write and the last a read; those between are ignores with probability ``ignore``, else
    writes or reads alike. Asked is at every read.

    Args:
      key: the same key gives the same batch.
      batch_size, length: B and T, which is even and at least 4.
      ignore: the probability that an instruction is to be ignored, in [0, 1].

    Raises:
      ValueError: a length or a probability out of range.

    Source: arXiv 2306.00946, section 3.

    >>> import jax
    >>> from attnorm.data.flip_flop import flip_flop_batch
    >>> questions = flip_flop_batch(jax.random.key(0), batch_size=1, length=8, ignore=1.0)
    >>> questions.inputs[0, ::2].tolist(), questions.source[0].tolist()
    ([0, 2, 2, 1], [-1, -1, -1, -1, -1, -1, 1, -1])
    """
    if length < 4 or length % 2:
        raise ValueError(f"length must be even and at least 4, got {length}")
    if not 0 <= ignore <= 1:
        raise ValueError(f"ignore must be in [0, 1], got {ignore!r}")
    kind_key, bit_key = jax.random.split(key)
    shape = (batch_size, length // 2)
    uniform = jax.random.uniform(kind_key, shape)
    kinds = jnp.where(uniform < ignore, IGNORE, jnp.where(uniform < (1 + ignore) / 2, WRITE, READ))
    kinds = kinds.at[:, 0].set(WRITE).at[:, -1].set(READ)
    bits = jax.random.bernoulli(bit_key, shape=shape).astype(jnp.int32)

    pair = jnp.arange(length // 2)
    last_write = jax.lax.cummax(jnp.where(kinds == WRITE, pair, 0), axis=1)
    stored = jnp.take_along_axis(bits, last_write, axis=1)
    is_read = kinds == READ
    bits = ZERO + jnp.where(is_read, stored, bits)

    def at_instructions(values, elsewhere):
        return jnp.stack([values, jnp.full_like(values, elsewhere)], axis=2).reshape(batch_size, length)

    return Questions(
        inputs=jnp.stack([kinds, bits], axis=2).reshape(batch_size, length),
        answers=at_instructions(jnp.where(is_read, bits, 0), 0),
        is_asked=at_instructions(is_read, False),
        source=at_instructions(jnp.where(is_read, 2 * last_write + 1, -1), -1),
    )


def flip_flop_right(questions: Questions) -> Bool[Array, "B T S"]:
    """For each read, the keys whose bit is the answer: that of the last write, and of every read since.

    >>> import jax
    >>> from attnorm.data.flip_flop import flip_flop_batch, flip_flop_right
    >>> questions = flip_flop_batch(jax.random.key(0), batch_size=1, length=8, ignore=1.0)
    >>> flip_flop_right(questions)[0, 6].tolist()
    [False, True, False, False, False, False, False, False]
    """
    key = jnp.arange(questions.inputs.shape[1])
    instruction = jnp.roll(questions.inputs, 1, axis=1)  # at a bit, what stands before it
    is_kept = (key % 2 == 1) & (instruction != IGNORE)
    is_since = (key >= questions.source[..., None]) & (key <= key[:, None])
    return questions.is_asked[..., None] & is_kept[:, None, :] & is_since


def flip_flop_chance() -> float:
    """The accuracy of a guess that does not look back."""
    return 0.5
