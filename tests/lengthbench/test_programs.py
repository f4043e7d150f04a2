"""Members with rates of their own against the rule, and the smallest suite from start to end."""

import dataclasses
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import jax
import numpy as np
import pytest

from attnorm import get_normalizer
from attnorm.lengthbench.contenders import parse_contender
from attnorm.lengthbench.programs import MemberRate, Programs, make_members
from attnorm.lengthbench.suites import SUITES
from attnorm.lengthbench.tasks import TASKS

TINY = SUITES["tiny"]


def make_programs(task, num_steps):
    spec = dataclasses.replace(TASKS[task]("tiny"), num_steps=num_steps)
    return Programs(spec.make(parse_contender("softmax", ()), TINY), TINY)


@pytest.mark.slow
def test_each_member_moves_by_its_own_learning_rate():
    programs = make_programs("flip_flop", 1)
    members = make_members([get_normalizer("softmax")] * 3, [7, 7, 8], [1e-3, 3e-3, 1e-3])
    start = jax.device_get(programs._start(members.seeds, members.learning_rates).params[0])
    end = jax.device_get(programs.train(members, lambda count, message: None).params[0])
    moved = jax.tree.map(lambda a, b: b - a, start, end)
    for x in jax.tree.leaves(moved["model"]):
        np.testing.assert_allclose(3 * x[0], x[1], rtol=1e-3, atol=3e-6)
    embedding = moved["model"]["token_embedding"]["embedding"]
    assert np.max(np.abs(embedding[0])) > 1e-4
    assert np.max(np.abs(embedding[0] - embedding[2])) > 1e-4


@pytest.mark.slow
def test_rates_outlast_a_reset_of_the_optimizer():
    programs = make_programs("counting", 4)
    members = make_members([get_normalizer("softmax")] * 2, [0, 0], [1e-3, 2e-3])
    state = programs.train(members, lambda count, message: None)
    rates = [x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, MemberRate))
             if isinstance(x, MemberRate)]  # fmt: skip
    np.testing.assert_array_equal(rates[0].rate, members.learning_rates)
    assert int(state.step) == 4


@pytest.mark.slow
def test_the_tiny_suite_ends_with_a_report_and_a_cell_that_is_run_again_is_the_same(tmp_path):
    command = [sys.executable, "-m", "attnorm.lengthbench", "--suite", "tiny", "--jobs", "2"]
    command += ["--out", str(tmp_path)]
    # What XLA does not optimise is compiled sooner, and takes as long here.
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    environment = os.environ | {"XLA_FLAGS": flags}

    def run():
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    assert "4 cells, 0 of them complete" in run()
    paths = sorted(tmp_path.glob("cells/*/*.json"))
    assert len(paths) == 4
    assert f"--suite tiny --jobs 2 --out {tmp_path}" in (tmp_path / "report.md").read_text()
    ElementTree.fromstring((tmp_path / "report.html").read_text())

    path = tmp_path / "cells" / "max_retrieval" / "lp(p=2).json"
    first = json.loads(path.read_text())["cell"]
    assert first["made"]["settings"]["cores"] == 1
    assert len({row["loss"] for row in first["rows"]}) == len(TINY.factors) * TINY.num_seeds
    path.unlink()
    assert "4 cells, 3 of them complete" in run()
    second = json.loads(path.read_text())["cell"]
    for name in ("sweep", "chosen", "rows", "diagnostics", "settings"):
        assert first[name] == second[name]
