"""Tasks of questions with one right answer, for a decoder."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Bool

from attnorm.data.questions import Questions
from attnorm.lengthbench.contenders import Contender
from attnorm.lengthbench.suites import MAIN, Suite
from attnorm.models.gpt import GPT, GPTConfig
from attnorm.models.stack import run_stack
from attnorm.training.task import Stage


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceSpec:
    """A task, without what is to solve it."""

    draw: Callable[..., Questions]  # draw(key, batch_size, length, **options)
    length: int  # of training
    num_steps: int
    vocab_size: int
    position: str  # of GPTConfig
    metric: str  # "accuracy" or "error" of answers, or "exact", all answers of a sequence right
    mastery: float  # the metric at the training length from which on others are read
    chance: Callable[[int], float]  # the metric of a guess, by length
    width: int = 1  # positions of a sequence by its length, about
    training: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # options of `draw` in training
    # Options in evaluation, by the name of the variant; MAIN is like training.
    variants: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=lambda: {MAIN: {}})
    higher_is_better: bool = True
    is_ratio: bool = False  # whether it is compared by its logarithm
    facts: str = ""  # what else a reader of the report has to know
    text: str = ""  # the fingerprint of what `draw` reads
    fewest_sequences: int = 64  # of an evaluation, at each length
    # (B, T, S): the keys that hold the answer of a position where something is asked; None for the source alone.
    right: Callable[[Questions], Bool[Array, "B T S"]] | None = None

    def make(self, contender: Contender, suite: Suite) -> "SequenceTask":
        return SequenceTask(self, contender, suite)


class SequenceTask:
    """What the training step and the evaluation ask of a :class:`attnorm.training.task.Task`."""

    def __init__(self, spec: SequenceSpec, contender: Contender, suite: Suite):
        self.spec = spec
        self.contender = contender
        self.stages = (Stage(0, 0, spec.num_steps, spec.length),)
        self.batch_size = max(1, suite.tokens_per_batch // (spec.width * spec.length))
        self._config = GPTConfig(
            vocab_size=spec.vocab_size,
            max_length=spec.width * spec.length,
            num_layers=suite.num_layers,
            num_heads=suite.num_heads,
            features=suite.features,
            mlp_features=2 * suite.features,
            position=spec.position,
            tie_embeddings=False,
        )
        self._graph = nnx.graphdef(nnx.eval_shape(lambda: self._model(0)))

    def _model(self, seed):
        return GPT(self._config, rngs=nnx.Rngs(seed))

    def init(self, key):
        model = nnx.to_pure_dict(nnx.state(self._model(key), nnx.Param))
        learned = self.contender.initial_parameters(self._config.num_layers, self._config.num_heads)
        return {"model": model, "learned": learned}, ()

    def host_batches(self, stage, process_index, process_count):
        return None

    def batch(self, key, stage):
        return self.spec.draw(key, self.batch_size, stage.length, **self.spec.training)

    def apply(self, params, model_state, batch, attention, tap=None):
        """The logits of the answer at each position."""
        del model_state
        model = nnx.merge(self._graph, nnx.State(params["model"]))
        attend = self.contender.attend(attention, params["learned"], tap)
        positions = jnp.broadcast_to(jnp.arange(batch.answers.shape[1]), batch.answers.shape)
        if jnp.issubdtype(batch.inputs.dtype, jnp.floating):  # mixtures of tokens
            x = batch.inputs @ model.token_embedding.embedding[...]
        else:
            x = model.embed(batch.inputs, positions)
        # Layers one by one, so that each finds its own learned parameters.
        x = run_stack(model.blocks, lambda block, x: block(x, attend, positions), x, scan=False, remat="none")
        return model.logits(model.norm(x))

    def loss(self, params, model_state, batch, attention):
        logits = self.apply(params, model_state, batch, attention)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.answers)
        total = jnp.sum(jnp.where(batch.is_asked, losses, 0))
        return total, (jnp.sum(batch.is_asked, dtype=jnp.float32), model_state)

    def eval_draw(self, key, batch_size, length, variant):
        return self.spec.draw(key, batch_size, length, **self.spec.variants[variant])

    def per_sequence(self, params, model_state, batch, positions, attention):
        """Sums over the questions of each sequence.

        Greedy decoding gives all answers right if and only if each is the likeliest after the right ones before it.
        """
        del positions  # nothing is asked after them
        logits = self.apply(params, model_state, batch, attention)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.answers)
        is_right = jnp.argmax(logits, axis=-1) == batch.answers

        def over_questions(x):
            return jnp.sum(jnp.where(batch.is_asked, x, 0), axis=1, dtype=jnp.float32)

        return {
            "loss": over_questions(losses),
            "right": over_questions(is_right),
            "asked": over_questions(True),
            "exact": jnp.all(is_right | ~batch.is_asked, axis=1).astype(jnp.float32),
        }

    def summarize(self, means, length):
        del length
        return {
            "loss": means["loss"] / means["asked"],
            "accuracy": means["right"] / means["asked"],
            "error": 1 - means["right"] / means["asked"],
            "exact": means["exact"],
        }

    def questions(self, batch):
        """Where something is asked, and which keys hold the answer there: (B, T) and (B, T, S)."""
        if self.spec.right is not None:
            return batch.is_asked, self.spec.right(batch)
        keys = jnp.arange(batch.answers.shape[1])
        return batch.is_asked, batch.source[..., None] == keys
