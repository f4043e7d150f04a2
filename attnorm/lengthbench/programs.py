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
from attnorm.lengthbench.evaluation import SPLITS, Evaluation, Place, buckets, draw_padded
from attnorm.lengthbench.suites import MAIN, Suite
from attnorm.normalizers import Normalizer
from attnorm.normalizers.lp import Lp
from attnorm.training.config import EnsembleConfig, MeshConfig, OptimizerConfig, TrainConfig
from attnorm.training.ensemble import Group
from attnorm.training.mesh import make_mesh
from attnorm.training.optimizer import make_optimizer
from attnorm.training.state import TrainState, init_state, reset_optimizer
from attnorm.training.step import make_evaluate, make_train_step

# A stage in parts, between which the progress bar moves.
_PARTS, _PARTS_A_LINE = 20, 5
_DIAGNOSED_SEQUENCES = 4


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
    """All functions are of a whole set of members, and compile once for a number of members.

    They also serve every normaliser of the same structure, because its parameters are arguments.
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
        spec = task.spec
        self._buckets = buckets(suite.factors, spec.length, tuple(spec.variants))
        self._diagnosed = tuple(
            (factor * spec.length, MAIN)
            for factor in suite.factors
            if spec.width * factor * spec.length <= suite.diagnosed_positions
        )
        self._evaluate = functools.cache(self._make_evaluate)
        self._diagnose = jax.jit(self._make_diagnose)

    def train(self, members: Members, progress: Callable[[int, str | None], None]) -> TrainState:
        """The state after the last update; progress hears of the updates since it last did, and at times of the loss."""
        state = self._start(members.seeds, members.learning_rates)
        for stage in self.stages:
            if stage.index and self._config.optimizer.reset_optimizer:
                state = _with_rates(reset_optimizer(state, self._optimizer), members.learning_rates)
            part = math.ceil(stage.num_steps / _PARTS)
            for index, done in enumerate(range(0, stage.num_steps, part)):
                count = min(part, stage.num_steps - done)
                state, loss = self._advance[stage.index](state, members, count)
                loss.block_until_ready()  # so that progress is of what is done
                progress(count, self._message(stage, loss) if index % _PARTS_A_LINE == 0 else None)
        return state

    def validate(self, state: TrainState, members: Members) -> dict[str, Float[Array, "M"]]:
        """The metrics at the training length, on sequences that no test has."""
        return self._evaluate(self._buckets[0])(state, members, SPLITS.index("validation"))[0]

    def test(self, state: TrainState, members: Members) -> dict[Place, dict[str, Float[Array, "M"]]]:
        """The metrics of `task.summarize` at every length and in every variant."""
        return {
            place: metrics
            for bucket in self._buckets
            for place, metrics in zip(
                bucket, self._evaluate(bucket)(state, members, SPLITS.index("test")), strict=True
            )
        }

    def diagnose(self, state: TrainState, members: Members) -> dict[Place, dict[str, Float[Array, "M"]]]:
        """See :func:`attnorm.lengthbench.diagnostics.diagnose`; at lengths whose weights fit into memory."""
        found = self._diagnose(state.params[0], state.model_state[0], members.normalizer)
        return {
            place: {name: values[:, index] for name, values in found.items()}
            for index, place in enumerate(self._diagnosed)
        }

    def _message(self, stage, loss):
        loss = jax.device_get(loss)
        return f"length {stage.length}  loss {min(loss):.3g} to {max(loss):.3g}"

    def _groups(self, members):
        return (Group((), members.normalizer, members.seeds),)

    def _make_start(self, seeds, learning_rates):
        groups = (Group((), Lp(1.0), seeds),)  # weights do not depend on the normaliser
        state = init_state(self.task, groups, self._optimizer, self._config, self._mesh)
        return _with_rates(state, learning_rates)

    def _make_advance(self, stage, state, members, count):
        step = make_train_step(
            self.task, self._groups(members), self._optimizer, self._config, stage, self._mesh
        )

        def update(_, carry):
            state, _ = carry
            state, metrics = step(state, None)
            return state, metrics["loss"]

        return jax.lax.fori_loop(0, count, update, (state, jnp.zeros(members.seeds.shape)))

    def _make_evaluate(self, bucket):
        def evaluate(state, members, split):
            evaluation = Evaluation(self.task, self._suite, bucket, split)
            return make_evaluate(evaluation, self._groups(members), self._config, self._mesh)(state)

        return jax.jit(evaluate)

    def _make_diagnose(self, *members):
        def of_member(member):
            params, model_state, normalizer = member
            places = self._diagnosed
            batch, positions = draw_padded(self.task, jax.random.key(1), _DIAGNOSED_SEQUENCES, places)
            return diagnose(self.task, params, model_state, normalizer, batch, positions, len(places))

        # One member at a time, because dense weights take memory.
        return jax.lax.map(of_member, members)


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
