"""Checkpoints: written in the background, complete or absent, the newest few and every so many steps kept."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from attnorm.training.state import TrainState


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Those before it are complete."""


class Checkpointer:
    """Saves and restores a TrainState by step.

    Args:
      directory: an absolute path, made where it does not exist.
      keep: how many of the newest checkpoints stay.
      period: beside them, those of steps that are multiples of it stay; 0: none.
    """

    def __init__(self, directory: Path, keep: int, period: int = 0):
        self._directory = directory
        self._failed = False
        options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=period or None, cleanup_tmp_directories=True
        )
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def latest_step(self) -> int | None:
        """The step of the newest complete checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState) -> None:
        """Returns when the state has been copied; writing goes on in the background.

        Raises:
          CheckpointError: this one, or the one before, could not be written.
        """
        with self._explained():
            self._manager.save(step, args=ocp.args.StandardSave(state))

    def restore(self, step: int, like: TrainState) -> TrainState:
        """The state of that step, with the shapes, types and shardings of ``like``, from whichever mesh it was on."""
        return self._manager.restore(step, args=ocp.args.StandardRestore(like))

    def wait(self) -> None:
        """Returns when everything saved is complete on disk.

        Raises:
          CheckpointError: as `save`.
        """
        with self._explained():
            self._manager.wait_until_finished()

    def abandon(self) -> None:
        """Closing will wait for nothing: other processes, which would have to agree, are gone."""
        self._failed = True

    def close(self) -> None:
        """Waits, then ends the background threads; after a failure there is nothing left to wait for."""
        if not self._failed:
            self.wait()
            self._manager.close()

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError:
            raise  # of the computation that made the state, not of writing it
        # What tensorstore and the file system raise, a full disk for example.
        except (OSError, RuntimeError, ValueError) as error:
            self._failed = True
            reason = str(error).splitlines()[0]
            missing = "space" if jax.process_count() == 1 else "space, and every process,"
            raise CheckpointError(
                f"a checkpoint in {self._directory} could not be written: {reason}\n"
                f"The checkpoints before it are complete. When there is {missing} again, the same command resumes."
            ) from error
