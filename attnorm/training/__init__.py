"""Training: the one loop, and the tasks that run in it."""
