"""Checkpoints: written in the background, complete or absent, the newest few kept."""

from pathlib import Path

import jax
import orbax.checkpoint as ocp

from attnorm.training.state import TrainState


class Checkpointer:
    """Saves and restores a TrainState by step.

    Args:
      directory: an absolute path, made where it does not exist.
      keep: how many of the newest checkpoints stay.
    """

    def __init__(self, directory: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Returns when the state has been copied; writing goes on in the background."""
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of that step, with the shapes, types and placement of ``like``."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._manager.restore(step, args=ocp.args.StandardRestore(abstract))

    def wait(self) -> None:
        """Returns when everything saved is complete on disk; raises what writing it raised."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()
