"""The compiled programs of a task: members of any seed and learning rate train, and are evaluated, side by side."""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from attnorm.lengthbench.diagnostics import diagnose
from attnorm.lengthbench.suites import Suite
from attnorm.normalizers import Normalizer
from attnorm.training.config import EnsembleConfig, MeshConfig, OptimizerConfig, TrainConfig
from attnorm.training.ensemble import Group
from attnorm.training.mesh import make_mesh
from attnorm.training.optimizer import make_optimizer
from attnorm.training.state import TrainState, init_state, reset_optimizer
from attnorm.training.step import make_evaluate, make_train_step

# A stage in parts, between which the progress bar moves.
_PARTS, _PARTS_A_LINE = 20, 5
# Positions of one evaluation batch: what is in memory at a time.
_EVAL_BATCH_TOKENS = 2**14
_DIAGNOSED_SEQUENCES = 4
# Dense weights of one layer of these sequences then take at most 16 MiB a head.
LONGEST_DIAGNOSED = 1024
_FEWEST_SEQUENCES, _MOST_SEQUENCES = 32, 512


class Members(NamedTuple):
    """One entry each; leaves of the normaliser have a leading member axis."""

    normalizer: Normalizer
    seeds: Int[Array, "M"]
    learning_rates: Float[Array, "M"]


def make_members(
    normalizers: Sequence[Normalizer], seeds: Sequence[int], learning_rates: Sequence[float]
) -> Members:
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *normalizers)
    return Members(stacked, jnp.array(seeds), jnp.array(learning_rates, jnp.float32))


class MemberRate(NamedTuple):
    """A state that scales updates: the learning rate of a member, which the schedule's factor then multiplies."""

    rate: Float[Array, ""]


class Programs:
    """All functions are of a whole set of members, and compile once for each number of members.

    A program also serves every normaliser of the same structure, because its parameters are arguments.
    """

    def __init__(self, task: Any, suite: Suite):
        self.task = task
        self.stages = task.stages
        self._suite = suite
        self._config = _train_config(suite, getattr(task.spec, "reset_optimizer", True))
        self._mesh = make_mesh(self._config.mesh)
        self._optimizer = optax.chain(make_optimizer(self._config.optimizer), _scale_by_member())
        self._start = jax.jit(self._make_start)
        self._advance = {
            stage.index: jax.jit(functools.partial(self._make_advance, stage), donate_argnums=0)
            for stage in task.stages
        }
        self._evaluate = functools.cache(self._jitted_evaluate)
        self._diagnose = functools.cache(self._jitted_diagnose)

    def train(self, members: Members, progress: Callable[[int, str | None], None]) -> TrainState:
        """The state after the last update; progress hears of the updates since it last did, and at times of the loss."""
        state = self._start(members)
        for stage in self.stages:
            if stage.index and self._config.optimizer.reset_optimizer:
                state = _with_rates(reset_optimizer(state, self._optimizer), members.learning_rates)
            part = math.ceil(stage.num_steps / _PARTS)
            for index, done in enumerate(range(0, stage.num_steps, part)):
                count = min(part, stage.num_steps - done)
                state, loss = self._advance[stage.index](state, members, count)
                progress(count, self._message(stage, loss) if index % _PARTS_A_LINE == 0 else None)
        return state

    def evaluate(
        self, state: TrainState, members: Members, length: int, variant: str, split: str
    ) -> dict[str, Float[Array, "M"]]:
        """The metrics of `task.summarize`; splits of different names have different sequences."""
        return self._evaluate(length, variant, split)(state, members)

    def diagnose(
        self, state: TrainState, members: Members, length: int, variant: str
    ) -> dict[str, Float[Array, "M"]]:
        """See :func:`attnorm.lengthbench.diagnostics.diagnose`."""
        return self._diagnose(length, variant)(state.params[0], state.model_state[0], members.normalizer)

    def _message(self, stage, loss):
        loss = jax.device_get(loss)
        return f"length {stage.length}  loss {min(loss):.3g} to {max(loss):.3g}"

    def _groups(self, members):
        return (Group((), members.normalizer, members.seeds),)

    def _make_start(self, members):
        state = init_state(self.task, self._groups(members), self._optimizer, self._config, self._mesh)
        return _with_rates(state, members.learning_rates)

    def _make_advance(self, stage, state, members, count):
        step = make_train_step(
            self.task, self._groups(members), self._optimizer, self._config, stage, self._mesh
        )

        def update(_, carry):
            state, _ = carry
            state, metrics = step(state, None)
            return state, metrics["loss"]

        return jax.lax.fori_loop(0, count, update, (state, jnp.zeros(members.seeds.shape)))

    def _jitted_evaluate(self, length, variant, split):
        evaluation = _Evaluation(self.task, self._suite, length, variant, split)

        def evaluate(state, members):
            return make_evaluate(evaluation, self._groups(members), self._config, self._mesh)(state)

        return jax.jit(evaluate)

    def _jitted_diagnose(self, length, variant):
        def of_member(member):
            params, model_state, normalizer = member
            batch = self.task.eval_draw(jax.random.key(1), _DIAGNOSED_SEQUENCES, length, variant)
            return diagnose(self.task, params, model_state, normalizer, batch)

        # One member at a time, because dense weights take memory.
        return jax.jit(lambda *members: jax.lax.map(of_member, members))


class _Evaluation:
    """What `make_evaluate` asks of a task, at one length."""

    def __init__(self, task, suite, length, variant, split):
        positions = task.spec.width * length
        sequences = min(max(suite.eval_tokens // positions, _FEWEST_SEQUENCES), _MOST_SEQUENCES)
        self._batch_size = min(sequences, max(1, _EVAL_BATCH_TOKENS // positions))
        self.num_eval_batches = math.ceil(sequences / self._batch_size)
        self._task, self._length, self._variant, self._split = task, length, variant, split
        self.evaluate = task.evaluate

    def eval_batch(self, key, index):
        key = jax.random.fold_in(key, {"validation": 0, "test": 1}[self._split])
        return self._task.eval_draw(key, self._batch_size, self._length, self._variant)

    def summarize(self, means):
        return self._task.summarize(means, self._length)


def _scale_by_member() -> optax.GradientTransformation:
    def init(params):
        return MemberRate(jnp.ones(()))

    def update(updates, state, params=None):
        return jax.tree.map(lambda x: x * state.rate, updates), state

    return optax.GradientTransformation(init, update)


def _with_rates(state: TrainState, rates: Float[Array, "M"]) -> TrainState:
    def is_rate(x):
        return isinstance(x, MemberRate)

    # A copy each time: the training step gives its state's memory away.
    return jax.tree.map(lambda x: MemberRate(jnp.copy(rates)) if is_rate(x) else x, state, is_leaf=is_rate)


def _train_config(suite: Suite, resets_optimizer: bool) -> TrainConfig:
    """Members have learning rates of their own, so the config's is 1."""
    return TrainConfig(
        experiment="lengthbench",
        task="lengthbench",
        ensemble=EnsembleConfig(normalizers=("softmax",), seeds=(0,), members_at_once=suite.members_at_once),
        optimizer=OptimizerConfig(
            name="adamw",
            schedule="wsd",
            learning_rate=1.0,
            weight_decay=0.01,
            beta1=0.9,
            beta2=0.99,
            beta2_exponent=0.0,
            clip_norm=1.0,
            warmup_fraction=0.1,
            cooldown_fraction=0.4,
            reset_optimizer=resets_optimizer,
        ),
        mesh=MeshConfig(data=-1, fsdp=1, context=1, tensor=1),
        accumulation_steps=1,
        ema_decay=0.0,
        init_from="",
        log_every=1,
        eval_every=0,
        checkpoint_every=1,
        keep_checkpoints=1,
        keep_period=0,
    )
