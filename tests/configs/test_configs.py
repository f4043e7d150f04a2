"""Every config is accepted by the loop, in full and as ``:runlocal``, and says how to run it."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import jax
import numpy as np
import pytest

from attnorm.training import loop
from attnorm.training.config import ConfigError
from attnorm.training.loop import parse_config

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))
COUNTING = [path for path in CONFIGS if path.stem.startswith("counting")]


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


@pytest.mark.parametrize("name", ["counting", "lm"])
def test_expected_results_are_those_of_the_readme(name):
    (path,) = (path for path in CONFIGS if path.stem == name)
    doc = ast.get_docstring(ast.parse(path.read_text()))
    expected = re.findall(
        r"\d+\.\d+", doc[doc.index("Expected:") :].partition("Other texts")[0].replace("3.11", "")
    )
    readme = (path.parents[1] / "README.md").read_text()
    assert len(expected) > 5
    assert not [
        number for number in expected if not re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", readme)
    ]


def test_sizes_of_counting():
    config, task = parse_config(get_config(COUNTING[0]).to_dict())
    assert [stage.length for stage in task.stages] == [16, 32, 64]
    assert len(config.ensemble.normalizers) == len(config.ensemble.seeds) == 3
    assert task.prefixes[-1] == 512


def test_sizes_of_the_published_run():
    config, task = parse_config(get_config(COUNTING[1]).to_dict())
    assert [stage.length for stage in task.stages] == [32 * 2**i for i in range(11)]
    assert {stage.num_steps for stage in task.stages} == {8192}
    assert {task.batch_size(stage) * stage.length for stage in task.stages} == {131072}
    assert config.optimizer.beta2_exponent == 0.8
    assert config.eval_every == 64


@pytest.mark.parametrize("path", COUNTING, ids=lambda path: path.stem)
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


LM = {path.stem: path for path in CONFIGS if path.stem.startswith("lm")}


@pytest.mark.parametrize(
    ("name", "argument", "expected"),
    [
        ("lm", "normalizer=sink,learned", {"normalizers": ("sink",), "learned_normalizer": "sink"}),
        ("lm", "normalizer=general(F=softplus,p=2)", {"normalizers": ("general(F=softplus,p=2)",)}),
        ("lm_extrapolation", "output_norm=head_layer", {"output_norm": "head_layer"}),
        ("lm_extrapolation", "trained_yarn=8", {"rope_factor": 8.0, "eval_yarn_factors": (1.0,)}),
        ("lm_extrapolation", "output_rescale=sqrt_position", {"eval_yarn_factors": (1.0, 32.0)}),
        ("lm_output_norms", "output_norm=head_rms", {"output_norm": "head_rms"}),
        ("lm_nope", "output_norm=global_layer", {"position": "none", "output_norm": "global_layer"}),
        ("lm_avnorm_lp", "eps=1e-3", {"output_norm": "head_rms", "output_norm_eps": 1e-3}),
        ("lm_retrofit", "steps=40", {"num_steps": 30, "init_from": "", "schedule": "constant"}),
        (
            "lm_retrofit",
            "steps=40,init_from=runs/a",
            {"num_steps": 10, "init_from": "runs/a", "schedule": "wsd"},
        ),
        ("lm_1b", "corpus=bible", {"corpus": "bible", "remat": "full", "fsdp": -1}),
        (
            "lm_1b",
            "length=1048576,context=64",
            {
                "length": 2**20,
                "max_length": 2**20,
                "context": 64,
                "batch_size": 8,
                "eval_length": 16384,
                "eval_batch_size": 64,
            },
        ),
    ],
)
def test_arguments_of_language_models(name, argument, expected):
    for size in ("", "runlocal", "published") if name != "lm_1b" else ("",):
        config = get_config(LM[name], f"{size},{argument}")
        parse_config(config.to_dict())
        sections = (config, config.ensemble, config.optimizer, config.mesh, config.lm, config.lm.model)
        found = {key: value for section in sections for key, value in section.items()}
        assert {key: found[key] for key in expected} == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("lm", "normalizer=sink,learned"),
        ("lm_extrapolation", "output_rescale=sqrt_position"),
        ("lm_output_norms", "output_norm=head_rms"),
        ("lm_nope", "output_norm=global_layer"),
        ("lm_avnorm_lp", ""),
        ("lm_1b", ""),
    ],
)
def test_language_models_run_locally(name, argument, tmp_path):
    config = get_config(LM[name], f"runlocal,{argument}").to_dict()
    assert loop.run(config, tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [{key: row[key] for key in row if key.startswith("loss/")} for row in rows]
    assert len(losses[0]) == len(config["ensemble"]["normalizers"])
    assert all(losses[-1][key] < losses[0][key] < 6 for key in losses[0])
    if name == "lm_avnorm_lp":  # where every p is the same model
        np.testing.assert_allclose(list(losses[-1].values()), losses[-1]["loss/softmax/seed0"], rtol=1e-4)


def test_published_sizes_of_language_models():
    _, task = parse_config(get_config(LM["lm_extrapolation"], "published").to_dict())
    model = task.config.model
    assert (model.num_layers, model.features, model.num_heads, model.head_size) == (11, 768, 6, 128)
    assert (task.config.length, task.config.num_steps, task.config.eval_length) == (2048, 4000, 65536)
    _, task = parse_config(get_config(LM["lm_1b"]).to_dict())
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    assert 1.25e9 < sum(x.size for x in jax.tree.leaves(params)) < 1.35e9
