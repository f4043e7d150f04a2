"""What the loop asks of a task. The loop knows nothing else about what is trained."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import grain
from jaxtyping import Array, Float, Int, PRNGKeyArray

from attnorm.training.ensemble import Member

Tree = Any  # a pytree of arrays
# attention(query, key, value, is_causal=..., scale=..., ...), as attnorm.dot_product_attention; its normaliser is the
# member's unless `normalizer` is given.
Attention = Callable[..., Float[Array, "B T N H"]]


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


class Evaluated(Protocol):
    """What evaluation asks for."""

    num_eval_batches: int

    def eval_batch(self, key: PRNGKeyArray, index: Int[Array, ""]) -> Tree:
        """As `Task.batch`, for evaluation; the same batches serve every member and every evaluation.

        Args:
          key: differs from batch to batch.
          index: of the batch, in [0, `num_eval_batches`).
        """

    def evaluate(self, params: Tree, model_state: Tree, batch: Tree, attention: Attention) -> Tree:
        """Means over the batch, which are then averaged over the `num_eval_batches`."""

    def summarize(self, means: Tree) -> Tree:
        """What follows from these averages; every leaf a number."""


class Task(Evaluated, Protocol):
    """Every array function concerns one member and is traced; the loop maps it over the ensemble."""

    Config: type[Any]  # the dataclass of the config section named after the task

    @property
    def outputs(self) -> Sequence[str]:
        """The files that `report` writes to the workdir."""

    @property
    def stages(self) -> Sequence[Stage]: ...

    def __init__(self, config: Any): ...

    def prepare(self, members: Sequence[Member]) -> str:
        """Checks what needs more than the config, such as data, before anything is written; returns facts to print.

        Raises:
          ConfigError: members or data that the task cannot use.
        """

    @property
    def fingerprint(self) -> str:
        """Another one for other data under the same config; "" where the config says all. After `prepare`."""

    def init(self, key: PRNGKeyArray) -> tuple[Tree, Tree]:
        """Parameters, and the state that the forward pass updates, such as running statistics."""

    def host_batches(self, stage: Stage, process_index: int, process_count: int) -> grain.MapDataset | None:
        """This process's part of the batches, from the host; None where `batch` makes them on the device.

        Element i, from ``stage.first_step`` on, is the part of the batch of the run's update i, 0 being the first:
        of all members, a tree of arrays with a leading batch axis. The parts of all processes make up the batch.
        """

    def batch(self, key: PRNGKeyArray, stage: Stage) -> Tree:
        """A batch that depends on the key alone; every leaf has a leading batch axis."""

    def loss(
        self, params: Tree, model_state: Tree, batch: Tree, attention: Attention
    ) -> tuple[Float[Array, ""], tuple[Float[Array, ""], Tree]]:
        """The sum of the losses of the batch's targets, and their number and the new model state.

        A sum, because parts of a batch may hold unequal numbers of targets: the step divides.
        """

    def summarize(self, means: Tree) -> Mapping[str, Float[Array, ""]]:
        """Named numbers from these averages."""

    def tokens_per_step(self, stage: Stage) -> int: ...

    def flops_per_step(self, stage: Stage) -> float: ...

    def report(self, workdir: Path, members: Sequence[Member], rows: Sequence[Mapping[str, Any]]) -> str:
        """Writes `outputs` from the evaluations at the ends of stages; returns text to print.

        A row has "length", the stage's, and ``name/member.label`` for each name of `summarize`.
        """
