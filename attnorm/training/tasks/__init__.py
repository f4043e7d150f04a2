"""The tasks, by the name that ``config.task`` gives."""

from attnorm.training.tasks.counting import CountingTask
from attnorm.training.tasks.lm import LMTask

TASKS = {"counting": CountingTask, "lm": LMTask}
