"""Passkey: a few digits somewhere in a text that says nothing, asked for at its end."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from attnorm.data.questions import Questions

KEY, ASK, FIRST_FILLER = 10, 11, 12  # after the ten digits
NUM_FILLERS = 16
VOCAB_SIZE = FIRST_FILLER + NUM_FILLERS


def passkey_batch(
    key: PRNGKeyArray, batch_size: int, length: int, *, num_digits: int = 5, depth: float | None = None
) -> Questions:
    """``fillers KEY d_1 ... d_k fillers ASK d_1 ... d_(k-1)``: the digits are the answers from ASK on.

    Args:
      key: the same key gives the same batch.
      batch_size, length: B and T.
      num_digits: k.
      depth: where KEY stands, from 0, the first position, to 1, right before ASK; None is uniform over all places.

    Raises:
      ValueError: a length that cannot hold the key and the question, or a depth outside [0, 1].

    Source: the task is that of "Landmark Attention", arXiv 2305.16300, with random tokens as its filler.

    >>> import jax
    >>> from attnorm.data.passkey import passkey_batch
    >>> questions = passkey_batch(jax.random.key(0), batch_size=1, length=8, num_digits=2, depth=1.0)
    >>> questions.source[0].tolist()
    [-1, -1, -1, -1, -1, -1, 4, 5]
    """
    if num_digits < 1 or length < 2 * num_digits + 1:
        raise ValueError(f"length must be at least 2 num_digits + 1 = {2 * num_digits + 1}, got {length}")
    if depth is not None and not 0 <= depth <= 1:
        raise ValueError(f"depth must be None or in [0, 1], got {depth!r}")
    filler_key, digit_key, place_key = jax.random.split(key, 3)
    ask = length - num_digits
    last_place = ask - num_digits - 1
    if depth is None:
        place = jax.random.randint(place_key, (batch_size, 1), 0, last_place + 1)
    else:
        place = jnp.full((batch_size, 1), round(depth * last_place))
    digits = jax.random.randint(digit_key, (batch_size, num_digits), 0, 10)
    fillers = jax.random.randint(filler_key, (batch_size, length), FIRST_FILLER, VOCAB_SIZE)

    row = jnp.arange(batch_size)[:, None]
    of_digits = place + 1 + jnp.arange(num_digits)
    inputs = fillers.at[row, place].set(KEY).at[row, of_digits].set(digits)
    inputs = inputs.at[:, ask].set(ASK).at[:, ask + 1 :].set(digits[:, :-1])
    nothing = jnp.zeros((batch_size, length), jnp.int32)
    return Questions(
        inputs=inputs,
        answers=nothing.at[:, ask:].set(digits),
        is_asked=jnp.broadcast_to(jnp.arange(length) >= ask, nothing.shape),
        source=(nothing - 1).at[:, ask:].set(of_digits),
    )


def passkey_chance() -> float:
    """The accuracy, by digit, of a guess that does not look at the text."""
    return 0.1
