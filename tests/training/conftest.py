"""The smallest counting run that has all parts: two stages, two groups of members, checkpoints between."""

import copy
import importlib.util
from pathlib import Path

import pytest

TINY = {
    "experiment": "tiny",
    "task": "counting",
    "ensemble": {"normalizers": ("lp(p=1)", "lp(p=2)", "linf"), "seeds": (0, 1), "members_at_once": 2},
    "optimizer": {
        "name": "adamw",
        "schedule": "wsd",
        "learning_rate": 3e-3,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "beta2_exponent": 0.0,
        "clip_norm": 1.0,
        "warmup_fraction": 0.25,
        "cooldown_fraction": 0.25,
        "reset_optimizer": True,
    },
    "mesh": {"data": -1, "fsdp": 1, "context": 1, "tensor": 1},
    "accumulation_steps": 1,
    "ema_decay": 0.0,
    "init_from": "",
    "log_every": 2,
    "eval_every": 4,
    "checkpoint_every": 3,
    "keep_checkpoints": 10,
    "keep_period": 0,
    "counting": {
        "vocab_size": 4,
        "first_length": 4,
        "num_stages": 2,
        "steps_per_stage": 6,
        "tokens_per_batch": 32,
        "eval_length": 16,
        "eval_batch_size": 4,
        "num_eval_batches": 2,
        "model": {"features": 8, "num_heads": 2, "num_blocks": 1, "norm": "batch"},
    },
}


@pytest.fixture
def tiny():
    return copy.deepcopy(TINY)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """The workdir of a tiny run that nothing interrupted. Copy before changing it."""
    from attnorm.training import loop

    workdir = tmp_path_factory.mktemp("tiny") / "run"
    assert loop.run(copy.deepcopy(TINY), workdir)
    return workdir


@pytest.fixture(scope="session")
def toy():
    """The module toy.py beside this one, which is also a program."""
    spec = importlib.util.spec_from_file_location("toy", Path(__file__).with_name("toy.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
