"""The measure of the training loop runs the training loop, and leaves nothing behind."""

import pytest

from attnorm.bench import loop_overhead
from attnorm.training.tasks import TASKS


def test_steps_are_timed_and_compared_with_the_bar():
    seconds = loop_overhead.run(60)["seconds_per_step"]
    # Of two spans of 20 steps, the median is the mean.
    assert 0 < seconds["mean"] <= seconds["max"]
    assert seconds["median"] == pytest.approx(seconds["mean"])
    assert "idle" not in TASKS
    assert loop_overhead.bar({"seconds_per_step": {"mean": 0.0019}}).passed
    assert not loop_overhead.bar({"seconds_per_step": {"mean": 0.0021}}).passed
