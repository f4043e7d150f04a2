"""What the loop asks of a task. The loop knows nothing else about what is trained."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from jaxtyping import Array, Float, PRNGKeyArray

from attnorm.normalizers import Normalizer
from attnorm.training.ensemble import Member

Tree = Any  # a pytree of arrays


@dataclasses.dataclass(frozen=True)
class Stage:
    """A part of the curriculum with its own shapes; ``first_step`` counts updates from the start of the run."""

    index: int
    first_step: int
    num_steps: int
    length: int

    @property
    def end(self) -> int:
        return self.first_step + self.num_steps


class Task(Protocol):
    """Every array function concerns one member and is traced; the loop maps it over the ensemble."""

    Config: type  # the dataclass of the config section named after the task
    outputs: Sequence[str]  # the files that `report` writes to the workdir
    stages: Sequence[Stage]
    num_eval_batches: int

    def __init__(self, config: Any): ...

    def init(self, key: PRNGKeyArray) -> tuple[Tree, Tree]:
        """Parameters, and the state that the forward pass updates, such as running statistics."""

    def batch(self, key: PRNGKeyArray, stage: Stage) -> Tree:
        """A batch that depends on the key alone; every leaf has a leading batch axis."""

    def loss(
        self, params: Tree, model_state: Tree, batch: Tree, normalizer: Normalizer
    ) -> tuple[Float[Array, ""], Tree]:
        """The mean loss of the batch and the new model state."""

    def eval_batch(self, key: PRNGKeyArray) -> Tree:
        """As `batch`, for evaluation; the same batches serve every member and every evaluation."""

    def evaluate(self, params: Tree, model_state: Tree, batch: Tree, normalizer: Normalizer) -> Tree:
        """Means over the batch, which are then averaged over the `num_eval_batches`."""

    def summarize(self, means: Tree) -> Mapping[str, Float[Array, ""]]:
        """Named numbers from these averages."""

    def tokens_per_step(self, stage: Stage) -> int: ...

    def flops_per_step(self, stage: Stage) -> float: ...

    def report(self, workdir: Path, members: Sequence[Member], rows: Sequence[Mapping[str, Any]]) -> str:
        """Writes `outputs` from the evaluations at the ends of stages; returns text to print.

        A row has "length", the stage's, and ``name/member.label`` for each name of `summarize`.
        """
