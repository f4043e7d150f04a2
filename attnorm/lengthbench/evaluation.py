"""Several lengths in one batch, and so in one compiled program.

Shorter sequences end in padding, which is after all that is asked and so hidden from it.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from attnorm.lengthbench.suites import Suite

Place = tuple[int, str]  # a length and a variant

# Positions of one evaluation batch: what is in memory at a time.
_BATCH_POSITIONS = 2**15
_FEWEST_SEQUENCES, _MOST_SEQUENCES = 16, 256
# Lengths up to this multiple of the training length share a program; a longer one would make the others slow.
_LONGEST_SHARED = 4
SPLITS = ("validation", "test")


def buckets(factors: Sequence[int], length: int, variants: Sequence[str]) -> list[tuple[Place, ...]]:
    """The places that are evaluated together; the first bucket has the training length.

    >>> from attnorm.lengthbench.evaluation import buckets
    >>> buckets((1, 2, 16), length=8, variants=("",))
    [((8, ''), (16, '')), ((128, ''),)]
    """
    shared = [factor for factor in factors if factor <= _LONGEST_SHARED]
    alone = [[factor] for factor in factors if factor > _LONGEST_SHARED]
    return [
        tuple((factor * length, variant) for factor in bucket for variant in variants)
        for bucket in [shared, *alone]
    ]


def draw_padded(
    task: Any, key: PRNGKeyArray, num_sequences: int, places: Sequence[Place]
) -> tuple[Any, Int[Array, "B"]]:
    """So many sequences of each place, one place after the other, and how many positions each has."""
    drawn = [
        task.eval_draw(jax.random.fold_in(key, index), num_sequences, length, variant)
        for index, (length, variant) in enumerate(places)
    ]
    sizes = [jax.tree.leaves(batch)[0].shape[1] for batch in drawn]

    def padded(x):
        return jnp.pad(x, [(0, 0), (0, max(sizes) - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])

    batch = jax.tree.map(lambda *parts: jnp.concatenate([padded(part) for part in parts]), *drawn)
    return batch, jnp.repeat(jnp.array(sizes), num_sequences)


class Evaluation:
    """What :func:`attnorm.training.step.make_evaluate` asks of a task, for a bucket of places.

    Args:
      split: of :data:`SPLITS`, by its index; different ones have different sequences.
    """

    def __init__(self, task: Any, suite: Suite, places: Sequence[Place], split: Int[Array, ""]):
        positions = task.spec.width * max(length for length, _ in places)
        variants = len({variant for _, variant in places})
        sequences = suite.eval_tokens // (positions * variants)
        sequences = min(max(sequences, _FEWEST_SEQUENCES), _MOST_SEQUENCES)
        at_once = max(1, _BATCH_POSITIONS // (positions * len(places)))
        self._num_sequences = min(sequences, at_once)
        self.num_eval_batches = math.ceil(sequences / self._num_sequences)
        self._task, self._places, self._split = task, places, split

    def eval_batch(self, key, index):
        del index  # the key differs too
        return draw_padded(
            self._task, jax.random.fold_in(key, self._split), self._num_sequences, self._places
        )

    def evaluate(self, params, model_state, batch, attention):
        batch, positions = batch
        values = self._task.per_sequence(params, model_state, batch, positions, attention)
        return {name: jnp.mean(x.reshape(len(self._places), -1), axis=1) for name, x in values.items()}

    def summarize(self, means):
        """The metrics of each place."""
        return [
            self._task.summarize({name: x[index] for name, x in means.items()}, length)
            for index, (length, _) in enumerate(self._places)
        ]
