"""Counting as a task of the benchmark: the training task as it is, with its error against the position-only guess."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from attnorm.data.counting import counting_batch, position_only_mse
from attnorm.lengthbench.contenders import Contender
from attnorm.lengthbench.suites import MAIN, Suite
from attnorm.training.tasks.counting import CountingConfig, CountingTask, ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingSpec:
    """Counting with a curriculum of lengths, each twice the one before."""

    first_length: int
    num_stages: int
    num_steps: int  # of all stages, a multiple of their number
    vocab_size: int
    norm: str = "layer"
    reset_optimizer: bool = True  # at each stage
    metric: str = "error"  # mean squared error over that of the position-only guess
    # A model that has not found the symbols to count stays near 1; one below .2 has explained four fifths of what
    # the position leaves open, and what it does at other lengths is about counting.
    mastery: float = 0.2
    higher_is_better: bool = False
    is_ratio: bool = True
    position: str = "none"  # but an embedding that marks position 0
    facts: str = "position 0 is marked"
    fewest_sequences: int = 64
    width: int = 1
    variants: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=lambda: {MAIN: {}})

    @property
    def length(self) -> int:
        """Of the end of training."""
        return self.first_length * 2 ** (self.num_stages - 1)

    def chance(self, length: int) -> float:
        return 1.0

    def make(self, contender: Contender, suite: Suite) -> "CountingBenchmark":
        return CountingBenchmark(self, contender, suite)


class CountingBenchmark:
    """See :class:`attnorm.lengthbench.sequences.SequenceTask`."""

    def __init__(self, spec: CountingSpec, contender: Contender, suite: Suite):
        self.spec = spec
        self.contender = contender
        self._num_layers, self._num_heads = suite.num_layers, suite.num_heads
        self._task = CountingTask(
            CountingConfig(
                vocab_size=spec.vocab_size,
                first_length=spec.first_length,
                num_stages=spec.num_stages,
                steps_per_stage=spec.num_steps // spec.num_stages,
                tokens_per_batch=suite.tokens_per_batch,
                eval_length=spec.length,
                eval_batch_size=1,
                num_eval_batches=1,
                model=ModelConfig(suite.features, suite.num_heads, suite.num_layers, spec.norm),
            )
        )
        self.stages = self._task.stages
        self.host_batches = self._task.host_batches
        self.batch = self._task.batch

    def init(self, key):
        model, model_state = self._task.init(key)
        learned = self.contender.initial_parameters(self._num_layers, self._num_heads)
        return {"model": model, "learned": learned}, model_state

    def loss(self, params, model_state, batch, attention):
        attend = self.contender.attend(attention, params["learned"])
        return self._task.loss(params["model"], model_state, batch, attend)

    def eval_draw(self, key, batch_size, length, variant):
        del variant
        return counting_batch(key, batch_size, length, self.spec.vocab_size)

    def apply(self, params, model_state, batch, attention, tap=None):
        """The training task's errors at each position, averaged over sequences."""
        attend = self.contender.attend(attention, params["learned"], tap)
        return self._task.evaluate(params["model"], model_state, batch, attend)

    def per_sequence(self, params, model_state, batch, positions, attention):
        """Means over the positions of each sequence."""
        tokens, _ = batch

        def of_sequence(sequence):
            alone = jax.tree.map(lambda x: x[None], sequence)
            return self.apply(params, model_state, alone, attention)

        is_there = jnp.arange(tokens.shape[1]) < positions[:, None]
        return {
            name: jnp.sum(jnp.where(is_there, by_position, 0), axis=1) / positions
            for name, by_position in jax.vmap(of_sequence)(batch).items()
        }

    def summarize(self, means, length):
        floor = position_only_mse(length, self.spec.vocab_size)
        return {"loss": means["mae"], "mse": means["mse"], "error": means["mse"] / floor}

    def questions(self, batch):
        """Every position asks, and the keys that answer are those that are counted."""
        tokens, _ = batch
        is_counted = (tokens == tokens[:, :1]).at[:, 0].set(False)
        before = jnp.tri(tokens.shape[1], dtype=bool)
        is_right = is_counted[:, None, :] & before
        return jnp.any(is_right, axis=-1), is_right
