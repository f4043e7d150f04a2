"""Text as questions: which byte comes next, and how well is it known far from the start?"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from attnorm.data.corpus import Corpus, open_corpus, unigram_entropy
from attnorm.data.questions import Questions
from attnorm.data.tokenizers import ByteTokenizer

VOCAB_SIZE = ByteTokenizer.vocab_size


def text_batch(key: PRNGKeyArray, batch_size: int, length: int, *, held_out: bool = False) -> Questions:
    """Windows of Python's manual, in bytes, from anywhere in it; no one position holds the answer.

    Args:
      key: the same key gives the same batch.
      batch_size, length: B and T.
      held_out: windows of the documents that are held out, about a fifth, and asked is only in the second half, at
        the positions ``[T/2, T)``; else of the others, and asked is everywhere.

    Raises:
      ValueError: a length that is below 2, or that the text does not have.

    >>> import jax
    >>> from attnorm.data.text_windows import text_batch
    >>> questions = text_batch(jax.random.key(0), batch_size=1, length=6, held_out=True)
    >>> questions.is_asked[0].tolist()
    [False, False, False, True, True, True]
    """
    stream = _corpus().held_out if held_out else _corpus().train
    if not 2 <= length < len(stream):
        raise ValueError(f"length must be from 2 to {len(stream) - 1}, got {length}")
    start = jax.random.randint(key, (batch_size, 1), 0, len(stream) - length)
    position = jnp.arange(length)
    tokens = jnp.asarray(stream.astype(np.uint16))  # a constant of the program: half as large
    first_asked = length // 2 if held_out else 0
    return Questions(
        inputs=tokens[start + position].astype(jnp.int32),
        answers=tokens[start + position + 1].astype(jnp.int32),
        is_asked=jnp.broadcast_to(position >= first_asked, (batch_size, length)),
        source=jnp.full((batch_size, length), -1),
    )


def text_chance() -> float:
    """The loss, in nats, of a guess that knows how often each byte occurs, and nothing else."""
    return unigram_entropy(_corpus().held_out)


def text_fingerprint() -> str:
    """Another one for the manual of another Python."""
    return _corpus().fingerprint


@functools.cache
def _corpus() -> Corpus:
    return open_corpus("python_manual", ByteTokenizer(), held_out=0.2)
