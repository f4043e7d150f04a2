"""Sort: the symbols once more, from the smallest to the largest."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from attnorm.data.questions import Questions, sizes, written_after


def sort_batch(
    key: PRNGKeyArray, batch_size: int, length: int, *, vocab_size: int = 32, shortest: int | None = None
) -> Questions:
    """``x_1 ... x_n SEP sorted(x)`` without the last. Arguments and errors as :func:`attnorm.data.copy.copy_batch`.

    Of equal symbols, the source is in the order of their positions.

    >>> import jax
    >>> from attnorm.data.sort import sort_batch
    >>> answers = sort_batch(jax.random.key(0), batch_size=1, length=5).answers[0, 5:].tolist()
    >>> answers == sorted(answers)
    True
    """
    size_key, symbol_key = jax.random.split(key)
    size = sizes(size_key, batch_size, length, shortest)
    symbols = jax.random.randint(symbol_key, (batch_size, length), 0, vocab_size)
    is_there = jnp.arange(length) < size[:, None]
    order = jnp.argsort(jnp.where(is_there, symbols, vocab_size), axis=1, stable=True)
    return written_after(symbols, order, size, separator=vocab_size)


def sort_chance(length: int, vocab_size: int = 32) -> float:
    """The probability of all right for the best guess that does not look: each symbol as often as the others.

    ``n! / Π c_v! / V^n`` with counts c that differ by at most 1.

    >>> from attnorm.data.sort import sort_chance
    >>> round(sort_chance(length=2, vocab_size=2), 6)
    0.5
    """
    count, more = divmod(length, vocab_size)
    log = math.lgamma(length + 1) - length * math.log(vocab_size)
    log -= more * math.lgamma(count + 2) + (vocab_size - more) * math.lgamma(count + 1)
    return math.exp(log)
