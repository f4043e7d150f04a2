"""Several lengths in one batch, and so in one compiled program.

Shorter sequences end in padding, which is after all that is asked and so hidden from it.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PRNGKeyArray

from attnorm.lengthbench.suites import MAIN, Suite

Place = tuple[int, str]  # a length and a variant

# Positions of one evaluation batch: what is in memory at a time.
BATCH_POSITIONS = 2**15
MOST_SEQUENCES = 1024
# Lengths up to this multiple of the training length share a program; a longer one would make the others slow.
LONGEST_SHARED = 4
SPLITS = ("validation", "test")


def buckets(factors: Sequence[int], length: int, variants: Sequence[str]) -> list[tuple[Place, ...]]:
    """The places that are evaluated together; the first bucket has the training length.

    The farthest length takes as long as all others together: there, all sequences are like training.

    >>> from attnorm.lengthbench.evaluation import buckets
    >>> buckets((1, 2, 16), length=8, variants=("", "sparse"))
    [((8, ''), (8, 'sparse'), (16, ''), (16, 'sparse')), ((128, ''),)]
    """
    shared = [factor for factor in factors if factor <= LONGEST_SHARED]
    alone = [factor for factor in factors if factor > LONGEST_SHARED]
    kinds = [(shared, variants), *(([factor], variants) for factor in alone[:-1])]
    kinds += [([factor], (MAIN,)) for factor in alone[-1:]]
    return [
        tuple((factor * length, variant) for factor in bucket for variant in of_bucket)
        for bucket, of_bucket in kinds
    ]


def num_sequences(suite: Suite, spec: Any, places: Sequence[Place]) -> int:
    """How many sequences of each place are evaluated, in batches that are all of one size."""
    num_batches, batch_size = _batches(suite, spec, places)
    return num_batches * batch_size


def _batches(suite, spec, places):
    positions = spec.width * max(length for length, _ in places)
    wanted = suite.eval_tokens // (positions * len({variant for _, variant in places}))
    wanted = min(max(wanted, spec.fewest_sequences), MOST_SEQUENCES)
    at_once = max(1, min(wanted, BATCH_POSITIONS // (positions * len(places))))
    return math.ceil(wanted / at_once), at_once


def draw_padded(
    task: Any, key: PRNGKeyArray, batch_size: int, places: Sequence[Place]
) -> tuple[Any, Int[Array, "B"]]:
    """So many sequences of each place, one place after the other, and how many positions each has."""
    drawn = [
        task.eval_draw(jax.random.fold_in(key, index), batch_size, length, variant)
        for index, (length, variant) in enumerate(places)
    ]
    sizes = [jax.tree.leaves(batch)[0].shape[1] for batch in drawn]

    def padded(x):
        return jnp.pad(x, [(0, 0), (0, max(sizes) - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])

    batch = jax.tree.map(lambda *parts: jnp.concatenate([padded(part) for part in parts]), *drawn)
    return batch, jnp.repeat(jnp.array(sizes), batch_size)


class Evaluation:
    """What :func:`attnorm.training.step.make_evaluate` asks of a task, for a bucket of places.

    Args:
      split: of :data:`SPLITS`, by its index; different ones have different sequences.
    """

    def __init__(self, task: Any, suite: Suite, places: Sequence[Place], split: Int[Array, ""]):
        self.num_eval_batches, self._batch_size = _batches(suite, task.spec, places)
        self._task, self._places, self._split = task, places, split

    def eval_batch(self, key, index):
        del index  # the key differs too
        return draw_padded(self._task, jax.random.fold_in(key, self._split), self._batch_size, self._places)

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
