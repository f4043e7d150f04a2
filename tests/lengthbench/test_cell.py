"""Which points a sweep tries, and that progress counts them all. Training is replaced by a known loss."""

from types import SimpleNamespace

import numpy as np

from attnorm.lengthbench.cell import num_updates, run_cell
from attnorm.lengthbench.contenders import parse_contender
from attnorm.lengthbench.suites import MAIN, SUITES

SMALL = SUITES["small"]
SPEC = SimpleNamespace(metric="accuracy", num_steps=10, length=4)


class FakePrograms:
    """The loss is least at the rate 1e-3 and the temperature 2."""

    task = SimpleNamespace(spec=SPEC)

    def train(self, members, progress):
        progress(SPEC.num_steps, None)
        return SimpleNamespace(params=[{"learned": {}}])

    def validate(self, state, members):
        rate = np.abs(np.log(np.asarray(members.learning_rates) / 1e-3))
        temperature = np.abs(np.log(np.asarray(members.normalizer.T) / 2))
        loss = rate + temperature
        return {"loss": loss, "accuracy": -loss}

    def test(self, state, members):
        self.tested = members
        return {(4, MAIN): {"accuracy": np.ones(3)}}

    def num_tested(self):
        return {(4, MAIN): 64}

    def diagnose(self, state, members):
        return {}

    def num_diagnosed(self):
        return {}


def test_temperatures_are_tried_at_the_best_rate_of_the_middle_one():
    contender, programs, counts = (
        parse_contender("softmax@temperature", SMALL.temperatures),
        FakePrograms(),
        [],
    )
    cell = run_cell(programs, SMALL, contender, lambda count, message: counts.append(count))
    tried = [(row["normalizer"], row["learning_rate"]) for row in cell["sweep"]]
    cold, middle, hot = contender.specs
    assert tried == [(middle, rate) for rate in SMALL.learning_rates] + [(cold, 1e-3), (hot, 1e-3)]
    assert cell["chosen"] == {"normalizer": hot, "learning_rate": 1e-3}
    np.testing.assert_allclose(programs.tested.normalizer.T, 2)
    assert sum(counts) == num_updates(SMALL, SPEC, contender)
    assert [row["sequences"] for row in cell["rows"]] == [64] * SMALL.num_seeds
