"""What the generated tasks with right answers have in common: at some positions a question, with one answer each."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray


class Questions(NamedTuple):
    """A batch. What a model predicts at a position may depend on the inputs up to it."""

    inputs: Int[Array, "B T"] | Float[Array, "B T V"]  # tokens, or mixtures of tokens
    answers: Int[Array, "B T"]  # a token; 0 where nothing is asked
    is_asked: Bool[Array, "B T"]
    source: Int[Array, "B T"]  # the position that holds the answer; -1 where nothing is asked, or none does


def sizes(
    key: PRNGKeyArray, batch_size: int, length: int, shortest: int | None, least: int = 1
) -> Int[Array, "B"]:
    """A size for each sequence: ``length``, or uniform in ``shortest..length``.

    Raises:
      ValueError: sizes that are not in order, or below the least.
    """
    shortest = length if shortest is None else shortest
    if length < least:
        raise ValueError(f"length must be at least {least}, got {length}")
    if not least <= shortest <= length:
        raise ValueError(f"shortest must be from {least} to length = {length}, got {shortest}")
    return jax.random.randint(key, (batch_size,), shortest, length + 1)


def written_after(
    symbols: Int[Array, "B L"], source: Int[Array, "B L"], size: Int[Array, "B"], separator: int
) -> Questions:
    """``x_1 ... x_n SEP y_1 ... y_(n-1)``, with y_i the answer at the position before its own; T = 2 L.

    Args:
      symbols: x; those from n on count as absent.
      source: which of them each y is.
      size: n, of each sequence.
      separator: a token that is no symbol; also what follows the answers where n < L.
    """
    length = symbols.shape[1]
    position = jnp.arange(2 * length)
    size = size[:, None]
    index = position - size  # of the answer at this position
    is_asked = (index >= 0) & (index < size)
    source = jnp.take_along_axis(source, jnp.clip(index, 0, length - 1), axis=1)
    answers = jnp.take_along_axis(symbols, jnp.where(is_asked, source, 0), axis=1)
    given = jnp.where(is_asked, jnp.roll(answers, 1, axis=1), separator)
    given = jnp.where(index == 0, separator, given)
    read = jnp.pad(symbols, ((0, 0), (0, length)))
    return Questions(
        inputs=jnp.where(position < size, read, given),
        answers=jnp.where(is_asked, answers, 0),
        is_asked=is_asked,
        source=jnp.where(is_asked, source, -1),
    )
