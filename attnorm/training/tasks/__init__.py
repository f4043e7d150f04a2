"""The tasks, by the name that ``config.task`` gives."""

from attnorm.training.tasks.counting import CountingTask

TASKS = {"counting": CountingTask}
