"""The tasks, by the name that ``config.task`` gives."""

from attnorm.training.task import Task
from attnorm.training.tasks.counting import CountingTask
from attnorm.training.tasks.lm import LMTask

TASKS: dict[str, type[Task]] = {"counting": CountingTask, "lm": LMTask}
