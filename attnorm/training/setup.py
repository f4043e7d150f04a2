"""What a config makes before any array exists."""

from collections.abc import Sequence

import jax

from attnorm.training.config import TrainConfig
from attnorm.training.ensemble import make_groups
from attnorm.training.mesh import make_mesh
from attnorm.training.optimizer import make_optimizer
from attnorm.training.state import TrainState, abstract_state, init_state
from attnorm.training.step import TrainStep, make_evaluate, make_train_step
from attnorm.training.task import Stage, Task


class Setup:
    """The members, the optimiser, the mesh, and the programs over them.

    Args:
      devices: of the mesh; by default all of this run's.

    Raises:
      ConfigError: a mesh that the devices cannot make up.
    """

    def __init__(self, config: TrainConfig, task: Task, devices: Sequence[jax.Device] | None = None):
        self.config = config
        self.task = task
        self.groups = make_groups(config.ensemble.normalizers, config.ensemble.seeds)
        self.members = [member for group in self.groups for member in group.members]
        self.optimizer = make_optimizer(config.optimizer)
        self.mesh = make_mesh(config.mesh, devices)
        self.num_steps = task.stages[-1].end

    def init_state(self) -> TrainState:
        return init_state(self.task, self.groups, self.optimizer, self.config, self.mesh)

    def abstract_state(self) -> TrainState:
        return abstract_state(self.task, self.groups, self.optimizer, self.config, self.mesh)

    def train_step(self, stage: Stage) -> TrainStep:
        return make_train_step(self.task, self.groups, self.optimizer, self.config, stage, self.mesh)

    def evaluate(self) -> jax.stages.Wrapped:
        """See :func:`attnorm.training.step.make_evaluate`."""
        return make_evaluate(self.task, self.groups, self.config, self.mesh)
