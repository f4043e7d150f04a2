"""The training step and the evaluation: one jitted program each, for the whole ensemble."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from attnorm.training.attention import make_attention
from attnorm.training.config import TrainConfig
from attnorm.training.ensemble import Group
from attnorm.training.mesh import over, replicated, split_batch
from attnorm.training.optimizer import learning_rate
from attnorm.training.placement import shardings
from attnorm.training.state import TrainState, abstract_state, data_key, eval_key
from attnorm.training.task import Evaluated, Stage, Task, Tree

Metrics = Mapping[str, Float[Array, "..."]]
# The batch is None where the task makes it on the device.


class TrainStep(Protocol):
    """A compiled function, which can also be compiled ahead of time."""

    def __call__(self, state: TrainState, host_batch: Tree | None, /) -> tuple[TrainState, Metrics]: ...

    def lower(self, state: TrainState, host_batch: Tree | None, /) -> jax.stages.Lowered: ...


def make_train_step(
    task: Task,
    groups: Sequence[Group],
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    stage: Stage,
    mesh: Mesh,
) -> TrainStep:
    """``state, batch -> (state after one update, metrics)``; the state is donated.

    Metrics are ``learning_rate`` and, with one number per member, ``loss`` and ``gradient_norm`` (not clipped).
    """

    @over(mesh)
    def train_step(state: TrainState, host_batch: Tree | None) -> tuple[TrainState, Metrics]:
        rate = learning_rate(config.optimizer, stage, state.step)

        def update_member(member):
            params, model_state, optimizer_state, ema, normalizer, seed = member
            batch = task.batch(data_key(seed, state.step), stage) if host_batch is None else host_batch
            total, count, gradients, model_state = _summed(
                task, params, model_state, batch, make_attention(normalizer, mesh), config, mesh
            )
            gradients = jax.tree.map(lambda gradient: gradient / count, gradients)
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
            params = jax.tree.map(lambda param, update: param - rate * update, params, updates)
            if config.ema_decay:
                ema = _averaged(ema, params, config.ema_decay, state.step)
            metrics = {"loss": total / count, "gradient_norm": optax.tree.norm(gradients)}
            return params, model_state, optimizer_state, ema, metrics

        updated = [
            _map_members(update_member, (*trees, group.normalizer, group.seeds), config)
            for *trees, group in zip(
                state.params, state.model_state, state.optimizer_state, state.ema, groups, strict=True
            )
        ]
        params, model_state, optimizer_state, ema, metrics = zip(*updated, strict=True)
        return (
            TrainState(state.step + 1, params, model_state, optimizer_state, ema),
            {"learning_rate": rate, **_concatenated(metrics)},
        )

    placed = jax.tree.map(lambda x: x.sharding, abstract_state(task, groups, optimizer, config, mesh))
    return jax.jit(train_step, donate_argnums=0, out_shardings=(placed, replicated(mesh)))


def make_evaluate(
    task: Evaluated, groups: Sequence[Group], config: TrainConfig, mesh: Mesh
) -> jax.stages.Wrapped:
    """``state -> metrics``, each with one number per member, jitted.

    Memory is that of one evaluation batch, and of the whole state, which a run keeps on its devices meanwhile.
    """

    @over(mesh)
    def evaluate(state: TrainState) -> Tree:
        evaluated = state.ema if config.ema_decay else state.params

        def means_of_batch(index):
            batch = split_batch(task.eval_batch(eval_key(index), index), mesh)

            def evaluate_member(member):
                params, model_state, normalizer = member
                return task.evaluate(params, model_state, batch, make_attention(normalizer, mesh))

            return [
                _map_members(evaluate_member, (params, model_state, group.normalizer), config)
                for params, model_state, group in zip(evaluated, state.model_state, groups, strict=True)
            ]

        by_batch = jax.lax.map(means_of_batch, jnp.arange(task.num_eval_batches))
        means = jax.tree.map(lambda x: jnp.mean(x, axis=0), by_batch)
        return _concatenated([jax.vmap(task.summarize)(group_means) for group_means in means])

    # What compilers report counts arguments: also those that stay, such as the optimiser's, and are not read.
    return jax.jit(evaluate, out_shardings=replicated(mesh), keep_unused=True)


def _summed(task, params, model_state, batch, attention, config, mesh):
    """Sum of the losses, number of targets, gradient of the sum, and the model state after the last part."""
    parts = config.accumulation_steps

    def of_part(model_state, part):
        (total, (count, model_state)), gradients = jax.value_and_grad(task.loss, has_aux=True)(
            params, model_state, split_batch(part, mesh), attention
        )
        # Where the parameter is, so that devices exchange sums of their own parts only.
        gradients = jax.lax.with_sharding_constraint(gradients, shardings(gradients, mesh))
        return (total, count, gradients), model_state

    if parts == 1:
        sums, model_state = of_part(model_state, batch)
        return *sums, model_state

    def add(carry, part):
        sums, model_state = carry
        more, model_state = of_part(model_state, part)
        return (jax.tree.map(jnp.add, sums, more), model_state), None

    # Part a has the rows a, a + parts, ...: of those on each device, so that no row moves.
    split = jax.tree.map(lambda x: jnp.moveaxis(x.reshape(-1, parts, *x.shape[1:]), 1, 0), batch)
    shapes, _ = jax.eval_shape(of_part, model_state, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    (sums, model_state), _ = jax.lax.scan(add, (zeros, model_state), split)
    return *sums, model_state


def _averaged(ema: Tree, params: Tree, decay: float, step: Int[Array, ""]) -> Tree:
    """``d ema + (1 - d) params``, d growing from 0.1 to the decay: early on, an average over the last tenth.

    The growth is that of TensorFlow's ExponentialMovingAverage, (1 + t) / (10 + t) at update t = 0, 1, ...
    """
    kept = jnp.minimum(decay, (1 + step) / (10 + step))
    return jax.tree.map(lambda average, param: kept * average + (1 - kept) * param, ema, params)


def _map_members(function: Callable[[Any], Any], members: Any, config: TrainConfig) -> Any:
    """The function of each member: some side by side under vmap, one such batch after the other."""
    if jax.tree.leaves(members)[0].shape[0] == 1:
        # A large model alone has neither a loop nor another axis around its kernels and collectives.
        alone = function(jax.tree.map(lambda x: x[0], members))
        return jax.tree.map(lambda x: x[None], alone)
    return jax.lax.map(function, members, batch_size=config.ensemble.members_at_once)


def _concatenated(metrics_by_group: Sequence[Tree]) -> Tree:
    return jax.tree.map(lambda *values: jnp.concatenate(values), *metrics_by_group)
