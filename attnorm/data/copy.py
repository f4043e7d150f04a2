"""Copy: the symbols once more, in the same order."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from attnorm.data.questions import Questions, sizes, written_after


def copy_batch(
    key: PRNGKeyArray, batch_size: int, length: int, *, vocab_size: int = 32, shortest: int | None = None
) -> Questions:
    """``x_1 ... x_n SEP x_1 ... x_n`` without the last, with i.i.d. uniform symbols; SEP is the token ``vocab_size``.

    Args:
      key: the same key gives the same batch.
      batch_size, length: B, and the largest number of symbols; T = 2 length.
      vocab_size: the number of symbols.
      shortest: where given, n is uniform in ``shortest..length``.

    Raises:
      ValueError: numbers of symbols that are not in order, or below 1.

    >>> import jax
    >>> from attnorm.data.copy import copy_batch
    >>> questions = copy_batch(jax.random.key(0), batch_size=1, length=3)
    >>> questions.source[0].tolist()
    [-1, -1, -1, 0, 1, 2]
    """
    size_key, symbol_key = jax.random.split(key)
    size = sizes(size_key, batch_size, length, shortest)
    symbols = jax.random.randint(symbol_key, (batch_size, length), 0, vocab_size)
    source = jnp.broadcast_to(jnp.arange(length), symbols.shape)
    return written_after(symbols, source, size, separator=vocab_size)


def copy_chance(length: int, vocab_size: int = 32) -> float:
    """The probability that a guess that does not look at the symbols has all of them right; also for reverse."""
    return float(vocab_size) ** -length
