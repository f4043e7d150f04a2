"""The training step and the evaluation: one jitted program each, for the whole ensemble."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from attnorm.training.config import TrainConfig
from attnorm.training.ensemble import Group
from attnorm.training.mesh import replicated, split_batch
from attnorm.training.optimizer import learning_rate
from attnorm.training.state import TrainState, data_key, eval_key
from attnorm.training.task import Stage, Task

Metrics = Mapping[str, Float[Array, "..."]]
TrainStep = Callable[[TrainState], tuple[TrainState, Metrics]]


def make_train_step(
    task: Task,
    groups: Sequence[Group],
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    stage: Stage,
    mesh: Mesh,
) -> TrainStep:
    """``state -> (state after one update, metrics)``; the argument is donated.

    Metrics are ``learning_rate`` and, with one number per member, ``loss`` and ``gradient_norm`` (not clipped).
    """

    def train_step(state: TrainState) -> tuple[TrainState, Metrics]:
        rate = learning_rate(config.optimizer, stage, state.step)

        def update_member(member):
            params, model_state, optimizer_state, normalizer, seed = member
            batch = split_batch(task.batch(data_key(seed, state.step), stage), mesh)
            (loss, model_state), gradients = jax.value_and_grad(task.loss, has_aux=True)(
                params, model_state, batch, normalizer
            )
            updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
            params = jax.tree.map(lambda param, update: param - rate * update, params, updates)
            metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
            return params, model_state, optimizer_state, metrics

        updated = [
            _map_members(
                update_member, (params, model_state, optimizer_state, group.normalizer, group.seeds), config
            )
            for params, model_state, optimizer_state, group in zip(
                state.params, state.model_state, state.optimizer_state, groups, strict=True
            )
        ]
        params, model_state, optimizer_state, metrics = zip(*updated, strict=True)
        return (
            TrainState(state.step + 1, params, model_state, optimizer_state),
            {"learning_rate": rate, **_concatenated(metrics)},
        )

    return jax.jit(train_step, donate_argnums=0, out_shardings=replicated(mesh))


def make_evaluate(
    task: Task, groups: Sequence[Group], config: TrainConfig, mesh: Mesh
) -> Callable[[TrainState], Metrics]:
    """``state -> metrics``, each with one number per member. Memory is that of one evaluation batch."""

    def evaluate(state: TrainState) -> Metrics:
        def means_of_batch(index):
            batch = split_batch(task.eval_batch(eval_key(index)), mesh)

            def evaluate_member(member):
                params, model_state, normalizer = member
                return task.evaluate(params, model_state, batch, normalizer)

            return [
                _map_members(evaluate_member, (params, model_state, group.normalizer), config)
                for params, model_state, group in zip(state.params, state.model_state, groups, strict=True)
            ]

        by_batch = jax.lax.map(means_of_batch, jnp.arange(task.num_eval_batches))
        means = jax.tree.map(lambda x: jnp.mean(x, axis=0), by_batch)
        return _concatenated([jax.vmap(task.summarize)(group_means) for group_means in means])

    return jax.jit(evaluate, out_shardings=replicated(mesh))


def _map_members(function: Callable[[Any], Any], members: Any, config: TrainConfig) -> Any:
    """The function of each member: some side by side under vmap, one such batch after the other."""
    return jax.lax.map(function, members, batch_size=config.ensemble.members_at_once)


def _concatenated(metrics_by_group: Sequence[dict[str, Any]]) -> dict[str, Float[Array, "M"]]:
    return jax.tree.map(lambda *values: jnp.concatenate(values), *metrics_by_group)
