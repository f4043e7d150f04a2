"""Counting as a training task: a curriculum of doubling lengths, and errors by prefix against the floor."""

import csv
import dataclasses
import functools
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from flax import nnx

from attnorm.analysis.length_generalization import draw, median_table
from attnorm.data.counting import counting_batch, position_only_mse
from attnorm.models.counting import NORMS, CountingTransformer
from attnorm.training.config import INT32_END, require
from attnorm.training.ensemble import Member
from attnorm.training.task import Stage
from attnorm.training.workdir import write_atomically

RESULTS = "results.csv"
FIGURE = "length_generalization.png"
COLUMNS = ("normalizer", "p", "seed", "trained_length", "prefix", "mse", "mae", "floor", "ratio")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    features: int
    num_heads: int
    num_blocks: int
    norm: str

    def __post_init__(self):
        for key in ("features", "num_heads", "num_blocks"):
            require(getattr(self, key) > 0, key, getattr(self, key), "a whole number > 0")
        require(
            self.features % self.num_heads == 0,
            "features",
            self.features,
            f"a multiple of {self.num_heads} heads",
        )
        require(self.norm in NORMS, "norm", self.norm, f"one of {', '.join(NORMS)}")


@dataclasses.dataclass(frozen=True)
class CountingConfig:
    vocab_size: int
    first_length: int
    num_stages: int  # each twice as long as the one before
    steps_per_stage: int
    tokens_per_batch: int  # of one member, at every length
    eval_length: int
    eval_batch_size: int
    num_eval_batches: int
    model: ModelConfig

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.type is int:
                value = getattr(self, field.name)
                require(0 < value < INT32_END, field.name, value, "a whole number > 0, less than 2^31")
        for key in ("vocab_size", "eval_length"):
            require(getattr(self, key) > 1, key, getattr(self, key), "a whole number > 1")
        require(self.num_stages <= 31, "num_stages", self.num_stages, "at most 31")
        num_steps = self.num_stages * self.steps_per_stage
        require(num_steps < INT32_END, "steps_per_stage", self.steps_per_stage, "less than 2^31 / num_stages")
        last_length = self.first_length * 2 ** (self.num_stages - 1)
        require(
            self.tokens_per_batch % last_length == 0,
            "tokens_per_batch",
            self.tokens_per_batch,
            f"a multiple of the last stage's length, {last_length}",
        )


class CountingTask:
    """See :class:`attnorm.training.task.Task`."""

    Config = CountingConfig
    outputs = (RESULTS, FIGURE)
    fingerprint = ""

    def __init__(self, config: CountingConfig):
        self.config = config
        self.num_eval_batches = config.num_eval_batches
        self.stages = tuple(
            Stage(i, i * config.steps_per_stage, config.steps_per_stage, config.first_length * 2**i)
            for i in range(config.num_stages)
        )
        self.prefixes = tuple(2**i for i in range(1, config.eval_length.bit_length()))
        self._graph, self._params, *_ = nnx.split(nnx.eval_shape(lambda: self._model(0)), nnx.Param, ...)

    def _model(self, seed) -> CountingTransformer:
        model = self.config.model
        return CountingTransformer(
            self.config.vocab_size,
            features=model.features,
            num_heads=model.num_heads,
            num_blocks=model.num_blocks,
            norm=model.norm,
            rngs=nnx.Rngs(seed),
        )

    def prepare(self, members):
        return ""

    def init(self, key):
        params, model_state = nnx.state(self._model(key), nnx.Param, ...)
        return nnx.to_pure_dict(params), nnx.to_pure_dict(model_state)

    def batch_size(self, stage):
        return self.config.tokens_per_batch // stage.length

    def host_batches(self, stage, process_index, process_count):
        return None

    def batch(self, key, stage):
        return counting_batch(key, self.batch_size(stage), stage.length, self.config.vocab_size)

    def loss(self, params, model_state, batch, attention):
        tokens, counts = batch
        model = nnx.merge(self._graph, nnx.State(params), nnx.State(model_state))
        predictions = model(tokens, _causal(attention))
        model_state = nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))
        count = jnp.float32(counts.size)
        return jnp.sum(jnp.abs(predictions - counts)), (count, model_state)

    def eval_batch(self, key, index):
        return counting_batch(
            key, self.config.eval_batch_size, self.config.eval_length, self.config.vocab_size
        )

    def evaluate(self, params, model_state, batch, attention):
        """Squared and absolute errors at each position."""
        tokens, counts = batch
        model = nnx.merge(self._graph, nnx.State(params), nnx.State(model_state))
        model.eval()
        errors = model(tokens, _causal(attention)) - counts
        return {"mse": jnp.mean(errors**2, axis=0), "mae": jnp.mean(jnp.abs(errors), axis=0)}

    def summarize(self, means):
        return {
            f"{name}/{prefix}": jnp.mean(by_position[:prefix])
            for name, by_position in means.items()
            for prefix in self.prefixes
        }

    def tokens_per_step(self, stage):
        return self.config.tokens_per_batch

    def flops_per_step(self, stage):
        """Multiplications and additions of matrix products, forward and twice that backward; causal halves used."""
        model = self.config.model
        weights = model.num_blocks * 6 * model.features**2
        attention = model.num_blocks * model.features * (stage.length + 1)
        return 3 * 2 * (weights + attention) * self.config.tokens_per_batch

    def report(self, workdir: Path, members: Sequence[Member], rows: Sequence[Mapping[str, Any]]) -> str:
        results = [
            {
                "normalizer": member.normalizer,
                "p": dict(member.params).get("p", ""),
                "seed": member.seed,
                "trained_length": row["length"],
                "prefix": prefix,
                "mse": row[f"mse/{prefix}/{member.label}"],
                "mae": row[f"mae/{prefix}/{member.label}"],
                "floor": (floor := position_only_mse(prefix, self.config.vocab_size)),
                "ratio": row[f"mse/{prefix}/{member.label}"] / floor,
            }
            for row in rows
            for member in members
            for prefix in self.prefixes
        ]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(results)
        write_atomically(workdir / RESULTS, text.getvalue())
        draw(workdir / RESULTS, workdir / FIGURE)
        return median_table(workdir / RESULTS)


def _causal(attention):
    return functools.partial(attention, is_causal=True)
