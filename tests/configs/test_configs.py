"""Every config is accepted by the loop, in full and as ``:runlocal``, and says how to run it."""

import ast
import importlib.util
from pathlib import Path

import pytest

from attnorm.training.config import ConfigError
from attnorm.training.loop import parse_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))


def get_config(path, argument=None):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config(argument)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config(path):
    config, task = parse_config(get_config(path).to_dict())
    assert config.experiment == path.stem
    _, small_task = parse_config(get_config(path, "runlocal").to_dict())
    work = [sum(stage.num_steps * t.flops_per_step(stage) for stage in t.stages) for t in (task, small_task)]
    assert work[1] < work[0] / 1000
    with pytest.raises(ConfigError, match="unknown key 'runlocl'; did you mean 'runlocal'"):
        get_config(path, "runlocl")
    doc = ast.get_docstring(ast.parse(path.read_text()))
    for word in ("python train.py --workdir=", "Hardware:", "Time:", "Expected:"):
        assert word in doc
    if path.stem != "counting":
        assert f"--config=configs/{path.name}" in doc


def test_sizes_of_counting():
    config, task = parse_config(get_config(CONFIGS[0]).to_dict())
    assert [stage.length for stage in task.stages] == [16, 32, 64]
    assert len(config.ensemble.normalizers) == len(config.ensemble.seeds) == 3
    assert task.prefixes[-1] == 512


def test_sizes_of_the_published_run():
    config, task = parse_config(get_config(CONFIGS[1]).to_dict())
    assert [stage.length for stage in task.stages] == [32 * 2**i for i in range(11)]
    assert {stage.num_steps for stage in task.stages} == {8192}
    assert {task.batch_size(stage) * stage.length for stage in task.stages} == {131072}
    assert config.optimizer.beta2_exponent == 0.8
    assert config.eval_every == 64


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize(
    "argument", ["steps=7,norm={}", "runlocal,steps=7,norm={}", "norm={},steps=7,runlocal"]
)
def test_arguments_reach_the_config(path, norm, argument):
    config = get_config(path, argument.format(norm))
    assert config.counting.steps_per_stage == 7
    assert config.counting.model.norm == norm
    assert config.counting.num_stages == (
        2 if "runlocal" in argument else get_config(path).counting.num_stages
    )
    assert get_config(path, "runlocal").counting.steps_per_stage == 10
