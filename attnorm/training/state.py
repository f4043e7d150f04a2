"""The state of a run: everything that a checkpoint holds."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Int

from attnorm.training.config import TrainConfig
from attnorm.training.ensemble import Group
from attnorm.training.placement import shardings
from attnorm.training.task import Task


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """One entry per group of the ensemble; every leaf but ``step`` has a leading member axis.

    Batches are a function of seed and step, so the step is also the state of the data.
    """

    step: Int[Array, ""]  # updates done
    params: tuple[Any, ...]
    model_state: tuple[Any, ...]
    optimizer_state: tuple[Any, ...]
    ema: tuple[Any, ...]  # of the parameters; each entry is () where config.ema_decay is 0


def init_key(seed: Int[Array, ""]) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), 0)


def data_key(seed: Int[Array, ""], step: Int[Array, ""]) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 1), step)


def eval_key(batch_index: Int[Array, ""]) -> jax.Array:
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2), batch_index)


def init_state(
    task: Task,
    groups: Sequence[Group],
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    mesh: Mesh,
) -> TrainState:
    """The state before the first update, over the mesh. Members of one seed start from the same weights."""
    init = _initializer(task, groups, optimizer, config)
    return jax.jit(init, out_shardings=shardings(jax.eval_shape(init), mesh))()


def abstract_state(
    task: Task,
    groups: Sequence[Group],
    optimizer: optax.GradientTransformation,
    config: TrainConfig,
    mesh: Mesh,
) -> TrainState:
    """Shapes, types and shardings of the state."""
    shapes = jax.eval_shape(_initializer(task, groups, optimizer, config))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings(shapes, mesh),
    )


def reset_optimizer(state: TrainState, optimizer: optax.GradientTransformation) -> TrainState:
    """The state with an optimiser that has seen nothing, placed as the one before."""
    places, structure = jax.tree.flatten(jax.tree.map(lambda x: x.sharding, state.optimizer_state))
    init = _jitted_init(optimizer, tuple(places), structure)
    return dataclasses.replace(state, optimizer_state=init(state.params))


# By what it is jitted for, so that a stage does not compile what one before has.
@functools.lru_cache(maxsize=8)
def _jitted_init(optimizer, places, structure):
    placed = jax.tree.unflatten(structure, places)
    return jax.jit(lambda params: init_optimizer(optimizer, params), out_shardings=placed)


def _initializer(task, groups, optimizer, config):
    def init() -> TrainState:
        members = [jax.vmap(lambda seed: task.init(init_key(seed)))(group.seeds) for group in groups]
        params = tuple(params for params, _ in members)
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            params=params,
            model_state=tuple(model_state for _, model_state in members),
            optimizer_state=init_optimizer(optimizer, params),
            ema=initial_ema(params, config),
        )

    return init


def initial_ema(params: tuple[Any, ...], config: TrainConfig) -> tuple[Any, ...]:
    """The average before the first update."""
    return jax.tree.map(jnp.copy, params) if config.ema_decay else tuple(() for _ in params)


def init_optimizer(optimizer: optax.GradientTransformation, params: tuple[Any, ...]) -> tuple[Any, ...]:
    """The optimiser's state before the first update."""
    return tuple(jax.vmap(optimizer.init)(group_params) for group_params in params)
