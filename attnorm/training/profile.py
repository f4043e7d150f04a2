"""A trace of some steps for TensorBoard and Perfetto."""

from pathlib import Path
from typing import Any

import jax

from attnorm.training.config import ConfigError


class Profile:
    """Writes the steps ``first`` to ``last`` to a folder; None for no trace."""

    def __init__(self, directory: Path, steps: tuple[int, int] | None):
        self._directory = directory
        self._steps = steps
        self.first_step = steps[0] if steps else None
        self._is_on = False

    def before(self, step: int) -> None:
        if step == self.first_step:
            jax.profiler.start_trace(str(self._directory))
            self._is_on = True

    def after(self, step: int, outputs: Any) -> None:
        if self._is_on and self._steps and step == self._steps[1]:
            jax.block_until_ready(outputs)
            self.close()

    def close(self) -> None:
        """Ends a trace that the run's end has cut short."""
        if self._is_on:
            jax.profiler.stop_trace()
            self._is_on = False


def parse_steps(text: str | None) -> tuple[int, int] | None:
    """The first and last step that a text names.

    Raises:
      ConfigError: not two whole numbers in order.

    >>> from attnorm.training.profile import parse_steps
    >>> parse_steps("10-12")
    (10, 12)
    """
    if text is None:
        return None
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last)):
        raise ConfigError(f"profile_steps must be the first and last step, such as 10-12, got {text!r}")
    return int(first), int(last)
