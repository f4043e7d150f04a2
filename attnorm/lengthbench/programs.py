"""The compiled programs of a task: members of any seed and learning rate train, and are evaluated, side by side."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from attnorm.lengthbench.diagnostics import diagnose
from attnorm.lengthbench.evaluation import (
    SPLITS,
    Evaluation,
    Place,
    buckets,
    draw_padded,
    num_sequences,
)
from attnorm.lengthbench.suites import MAIN, Suite
from attnorm.normalizers import Normalizer
from attnorm.normalizers.lp import Lp
from attnorm.training.config import EnsembleConfig, MeshConfig, OptimizerConfig, TrainConfig
from attnorm.training.ensemble import Group
from attnorm.training.mesh import make_mesh
from attnorm.training.optimizer import make_optimizer
from attnorm.training.placement import shardings
from attnorm.training.state import TrainState, init_optimizer, init_state
from attnorm.training.step import make_evaluate, make_train_step

# A stage in parts, between which the progress bar moves.
_PARTS, _PARTS_A_LINE = 20, 5
# Dense weights take memory: of so many sequences at a time, so many times.
DIAGNOSED_SEQUENCES, DIAGNOSED_DRAWS = 4, 8


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
        self._config = train_config(suite, task.spec)
        self._mesh = make_mesh(self._config.mesh)
        self._optimizer = optax.chain(make_optimizer(self._config.optimizer), _scale_by_member())
        self._start = jax.jit(self._make_start)
        self._reset = jax.jit(self._make_reset)
        self._advance = {
            stage.index: jax.jit(functools.partial(self._make_advance, stage), donate_argnums=0)
            for stage in task.stages
        }
        spec = task.spec
        self._buckets = buckets(suite.factors, spec.length, tuple(spec.variants))
        self._diagnosed = [
            tuple(
                (length, variant)
                for length, variant in bucket
                if variant == MAIN and spec.width * length <= suite.diagnosed_positions
            )
            for bucket in self._buckets
        ]
        self._evaluate = functools.cache(self._make_evaluate)
        self._diagnose = jax.jit(self._make_diagnose, static_argnums=0)

    def train(self, members: Members, progress: Callable[[int, str | None], None]) -> TrainState:
        """The state after the last update; progress hears of the updates since it last did, and at times of the loss."""
        state = self._start(members.seeds, members.learning_rates)
        for stage in self.stages:
            if stage.index and self._config.optimizer.reset_optimizer:
                fresh = self._reset(state.params, members.learning_rates)
                state = dataclasses.replace(state, optimizer_state=fresh)
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
        by_place = {}
        for places in filter(None, self._diagnosed):
            found = self._diagnose(places, state.params[0], state.model_state[0], members.normalizer)
            for index, place in enumerate(places):
                by_place[place] = {name: values[:, index] for name, values in found.items()}
        return by_place

    def num_tested(self) -> dict[Place, int]:
        """Of how many sequences the metrics of a member are."""
        return {
            place: num_sequences(self._suite, self.task.spec, bucket)
            for bucket in self._buckets
            for place in bucket
        }

    def num_diagnosed(self) -> dict[Place, int]:
        number = DIAGNOSED_SEQUENCES * DIAGNOSED_DRAWS
        return {place: number for places in self._diagnosed for place in places}

    def _message(self, stage, loss):
        loss = jax.device_get(loss)
        return f"length {stage.length}  loss {min(loss):.3g} to {max(loss):.3g}"

    def _groups(self, members):
        return (Group((), members.normalizer, members.seeds),)

    def _make_start(self, seeds, learning_rates):
        groups = (Group((), Lp(1.0), seeds),)  # weights do not depend on the normaliser
        state = init_state(self.task, groups, self._optimizer, self._config, self._mesh)
        rated = _with_rates(state.optimizer_state, learning_rates)
        return dataclasses.replace(state, optimizer_state=rated)

    def _make_reset(self, params, learning_rates):
        fresh = _with_rates(init_optimizer(self._optimizer, params), learning_rates)
        return jax.lax.with_sharding_constraint(fresh, shardings(fresh, self._mesh))

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

    def _make_diagnose(self, places, *members):
        def draw(index):
            return draw_padded(self.task, _diagnosed_key(index), DIAGNOSED_SEQUENCES, places)

        def of_member(member):
            params, model_state, normalizer = member
            return diagnose(self.task, params, model_state, normalizer, draw, DIAGNOSED_DRAWS, len(places))

        # One member at a time, because dense weights take memory.
        return jax.lax.map(of_member, members)


def _diagnosed_key(index: Int[Array, ""]) -> jax.Array:
    """Beside the keys of initial weights, training and evaluation, which fold 0, 1 and 2 in."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 3), index)


def _scale_by_member() -> optax.GradientTransformation:
    def init(params):
        return MemberRate(jnp.ones(()))

    def update(updates, state, params=None):
        return jax.tree.map(lambda x: x * state.rate, updates), state

    return optax.GradientTransformation(init, update)


def _with_rates(optimizer_state: Any, rates: Float[Array, "M"]) -> Any:
    def is_rate(x):
        return isinstance(x, MemberRate)

    def with_rate(x):
        # A copy each time: the training step gives its state's memory away.
        return MemberRate(jnp.copy(rates)) if is_rate(x) else x

    return jax.tree.map(with_rate, optimizer_state, is_leaf=is_rate)


def train_config(suite: Suite, spec: Any) -> TrainConfig:
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
            reset_optimizer=getattr(spec, "reset_optimizer", True),
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
