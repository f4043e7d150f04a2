"""A train step compiled for TPUs that are not there: what is printed, and what is refused."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from attnorm.training import aot
from attnorm.training.config import ConfigError
from attnorm.training.loop import parse_config
from attnorm.training.tasks import TASKS

ROOT = Path(__file__).parents[2]
CONFIG = "configs/counting.py:runlocal"
HUGE = ("--config.counting.model.features=65536", "--config.counting.model.num_heads=512")


def test_parts_that_do_not_divide_a_batch_are_an_error(toy, monkeypatch):
    monkeypatch.setitem(TASKS, "toy", toy.ToyTask)
    monkeypatch.setattr(aot, "tpu_devices", lambda topology: jax.devices())
    with pytest.raises(ConfigError, match="accumulation_steps must divide the 8 rows of a batch"):
        aot.compile_ahead(toy.config(accumulation_steps=3), "v5e:2x2")


def run(*arguments):
    pytest.importorskip("libtpu")
    command = [sys.executable, "train.py", f"--config={CONFIG}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.mark.slow
def test_report_of_a_step_on_four_chips():
    result = run("--aot=v5e:2x2", "--config.mesh.data=1", "--config.mesh.fsdp=2", "--config.mesh.tensor=2")
    assert result.returncode == 0, result.stderr
    out = result.stdout
    assert "4 x TPU v5 lite" in out
    used, available = map(float, re.search(r"memory per device: ([\d.]+) GiB of ([\d.]+) GiB", out).groups())
    assert 0 <= used < available == 16
    assert re.search(r"in evaluation: [\d.]+ GiB of 16.00 GiB", out)
    sys.path.insert(0, str(ROOT))
    from configs.counting import get_config

    config, task = parse_config(get_config("runlocal").to_dict())
    flops = len(config.ensemble.normalizers) * task.flops_per_step(task.stages[-1])
    assert float(re.search(r"FLOPs per step: ([\d.e+]+)", out)[1]) == pytest.approx(flops, rel=1e-3)
    assert re.search(r"all-(gather|reduce): \d+", out)
    assert "MFU at most" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--aot=v5e:2x2", *HUGE), "too little memory"),
        (("--aot=v5e:2x2", "--config.mesh.tensor=3"), "config.mesh must make up the 4 devices"),
        (("--aot=v9:2x2",), "--aot=v9:2x2"),
    ],
)
def test_what_does_not_fit_or_exist_is_an_error(arguments, message):
    result = run(*arguments)
    assert result.returncode == 1
    error = result.stderr[result.stderr.rindex("error: ") :]
    assert error.startswith("error: --aot=") and message in error
    assert "Traceback" not in result.stderr


ONE_CHIP = """
import jax
import jax.numpy as jnp
from attnorm import get_normalizer
from attnorm.topology import tpu_devices
from attnorm.training.attention import make_attention
from attnorm.training.config import MeshConfig
from attnorm.training.mesh import make_mesh

mesh = make_mesh(MeshConfig(data=1, fsdp=1, context=1, tensor=1), tpu_devices("v5e:2x2")[:1])
attention = make_attention(get_normalizer("l2"), mesh)
print("attnorm_forward" in str(jax.make_jaxpr(attention)(*jnp.ones((3, 1, 8, 2, 4)))))
"""


def test_one_chip_has_its_kernels():
    pytest.importorskip("libtpu")
    command = [sys.executable, "-c", ONE_CHIP]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.split()[-1] == "True"
