"""Counting: how often did the symbol at position 0 occur since?"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray


def counting_batch(
    key: PRNGKeyArray, batch_size: int, length: int, vocab_size: int
) -> tuple[Int[Array, "B T"], Float[Array, "B T"]]:
    """Sequences of i.i.d. uniform symbols, and at each position t the count of symbol 0's value in 1..t.

    Args:
      key: the same key gives the same batch.
      batch_size, length, vocab_size: B, T and the number of symbols.

    Returns:
      ``tokens`` (B, T), the target symbol at position 0, and ``counts`` (B, T), 0 at position 0.

    >>> import jax
    >>> from attnorm.data.counting import counting_batch
    >>> tokens, counts = counting_batch(jax.random.key(1), batch_size=1, length=8, vocab_size=2)
    >>> print(tokens[0], counts[0])
    [0 1 0 1 0 0 0 1] [0. 0. 1. 1. 2. 3. 4. 4.]
    """
    tokens = jax.random.randint(key, (batch_size, length), 0, vocab_size)
    is_target = (tokens == tokens[:, :1]).at[:, 0].set(False)
    return tokens, jnp.cumsum(is_target, axis=1, dtype=jnp.int32).astype(jnp.float32)


def position_only_mse(prefix: int, vocab_size: int) -> float:
    """Mean squared error, over the positions [0, prefix), of the best guess that sees the position alone.

    At position t the count is binomial with mean ``t/S`` and variance ``t (1/S)(1 - 1/S)``, S symbols; the mean
    over the prefix is ``(1/S)(1 - 1/S)(prefix - 1)/2``.

    >>> from attnorm.data.counting import position_only_mse
    >>> position_only_mse(prefix=9, vocab_size=2)
    1.0
    """
    probability = 1 / vocab_size
    return probability * (1 - probability) * (prefix - 1) / 2
