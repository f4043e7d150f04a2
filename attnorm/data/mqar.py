"""Multi-query associative recall: pairs of keys and values, then each key once more, asking for its value."""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from attnorm.data.questions import Questions

_GAP_EXPONENT = 0.01


def mqar_batch(
    key: PRNGKeyArray, batch_size: int, length: int, *, num_pairs: int, vocab_size: int = 8192
) -> Questions:
    """``k_1 v_1 ... k_n v_n``, then the keys again among fillers, near ones more often than far ones.

    Keys are distinct tokens of the lower half of the vocabulary, values distinct ones of the upper half. A key stands
    again at the g-th even place after the pairs, g = 1, 2, ..., with probability proportional to ``g^(0.01 - 1)``,
    without repetition.

    Args:
      key: the same key gives the same batch.
      batch_size, length: B and T.
      num_pairs: n.
      vocab_size: even; without the filler, which is the token ``vocab_size``.

    Raises:
      ValueError: an odd vocabulary, more pairs than keys, or pairs that do not fit the length.

    Source: Zoology, arXiv 2312.04927, section 4 and its public code. There fillers are random tokens unless that is
    turned off; among as few tokens as small models learn, they would often be keys that a wrong value follows.

    >>> import jax
    >>> from attnorm.data.mqar import mqar_batch
    >>> questions = mqar_batch(jax.random.key(0), batch_size=2, length=12, num_pairs=3, vocab_size=16)
    >>> questions.is_asked.sum(axis=1).tolist()
    [3, 3]
    """
    if vocab_size % 2:
        raise ValueError(f"vocab_size must be even, got {vocab_size}")
    half = vocab_size // 2
    if not 1 <= num_pairs <= half:
        raise ValueError(f"num_pairs must be from 1 to vocab_size / 2 = {half}, got {num_pairs}")
    if length < 4 * num_pairs:
        raise ValueError(f"length must be at least 4 num_pairs = {4 * num_pairs}, got {length}")

    def sequence(key):
        keys_key, values_key, gaps_key = jax.random.split(key, 3)
        keys = jax.random.permutation(keys_key, half)[:num_pairs]
        values = half + jax.random.permutation(values_key, half)[:num_pairs]
        start = 2 * num_pairs
        gap = jnp.arange(1, (length - start) // 2 + 1)
        # The largest of log-probabilities with Gumbel noise are a draw without repetition.
        noise = jax.random.gumbel(gaps_key, gap.shape)
        _, chosen = jax.lax.top_k((_GAP_EXPONENT - 1) * jnp.log(gap) + noise, num_pairs)
        place = start + 2 * chosen
        nothing = jnp.zeros(length, jnp.int32)
        inputs = jnp.full(length, vocab_size, jnp.int32)
        inputs = inputs.at[:start].set(jnp.stack([keys, values], axis=1).ravel())
        return Questions(
            inputs=inputs.at[place].set(keys),
            answers=nothing.at[place].set(values),
            is_asked=jnp.zeros(length, bool).at[place].set(True),
            source=(nothing - 1).at[place].set(2 * jnp.arange(num_pairs) + 1),
        )

    return jax.vmap(sequence)(jax.random.split(key, batch_size))


def mqar_chance(num_pairs: int) -> float:
    """The accuracy of naming one of the values that are there at random, without looking at keys."""
    return 1 / num_pairs
