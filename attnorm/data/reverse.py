"""Reverse: the symbols once more, from the last to the first."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from attnorm.data.questions import Questions, sizes, written_after


def reverse_batch(
    key: PRNGKeyArray, batch_size: int, length: int, *, vocab_size: int = 32, shortest: int | None = None
) -> Questions:
    """``x_1 ... x_n SEP x_n ... x_1`` without the last. Arguments and errors as :func:`attnorm.data.copy.copy_batch`.

    >>> import jax
    >>> from attnorm.data.reverse import reverse_batch
    >>> questions = reverse_batch(jax.random.key(0), batch_size=1, length=3)
    >>> questions.source[0].tolist()
    [-1, -1, -1, 2, 1, 0]
    """
    size_key, symbol_key = jax.random.split(key)
    size = sizes(size_key, batch_size, length, shortest)
    symbols = jax.random.randint(symbol_key, (batch_size, length), 0, vocab_size)
    return written_after(symbols, size[:, None] - 1 - jnp.arange(length), size, separator=vocab_size)
