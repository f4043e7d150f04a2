"""The first parameters of a run from those of another: ``config.init_from``."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from attnorm.training import workdir as files
from attnorm.training.config import ConfigError, TrainConfig
from attnorm.training.state import TrainState, initial_ema

_PARTS = ("params", "model_state")


def check_source(source: Path, like: TrainState) -> None:
    """Reads no array.

    Raises:
      ConfigError: the source has no checkpoint, or its models are not shaped like those of ``like``.
    """
    with _opened(source) as (saved, _):
        there = {name: tuple(x.shape) for name, x in _named(saved).items()}
    here = {name: tuple(x.shape) for name, x in _named(_parts(like)).items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise ConfigError(
                f"config.init_from: the models in {source} differ from those of this config: {name} has shape "
                f"{there.get(name, 'none')} there and {here.get(name, 'none')} here"
            )


def with_models_of(source: Path, state: TrainState, config: TrainConfig) -> TrainState:
    """The state with the parameters and model states of the source's newest checkpoint, placed as those before."""
    like = _parts(state)
    places = {name: x.sharding for name, x in _named(like).items()}
    with _opened(source) as (saved, restore):
        args = jax.tree_util.tree_map_with_path(
            lambda path, _: ocp.ArrayRestoreArgs(sharding=places[_name(path)]), saved
        )
        found = _named(restore(saved, args))
    parts = jax.tree_util.tree_map_with_path(lambda path, _: found[_name(path)], like)
    return dataclasses.replace(state, **parts, ema=initial_ema(parts["params"], config))


@contextlib.contextmanager
def _opened(source: Path) -> Iterator[tuple[dict[str, Any], Callable[[Any, Any], Any]]]:
    """What is saved of the models, as descriptions of arrays, and a function of these and orbax's arguments."""
    directory = source / files.CHECKPOINTS
    if not directory.is_dir():
        raise ConfigError(f"config.init_from must be the workdir of a run, got {str(source)!r}")
    manager = ocp.CheckpointManager(
        directory.absolute(),
        options=ocp.CheckpointManagerOptions(read_only=True),
        item_handlers=ocp.PyTreeCheckpointHandler(),
    )
    with contextlib.closing(manager):
        step = manager.latest_step()
        if step is None:
            raise ConfigError(f"config.init_from: {source} holds no complete checkpoint")
        tree = manager.item_metadata(step).tree

        def restore(item, restore_args):
            args = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
            return manager.restore(step, args=args)

        yield {part: tree[part] for part in _PARTS if _named(tree.get(part))}, restore


def _parts(state: TrainState) -> dict[str, Any]:
    return {part: getattr(state, part) for part in _PARTS if jax.tree.leaves(getattr(state, part))}


def _named(tree: Any) -> dict[str, Any]:
    """The arrays, or what describes them, by path: checkpoints spell indices as text and tuples as lists."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {_name(path): leaf for path, leaf in leaves if hasattr(leaf, "shape")}


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")
