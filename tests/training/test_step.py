"""The jitted step: a member of an ensemble trains as it would alone, on any number of devices."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm.training.loop import parse_config
from attnorm.training.setup import Setup

_MESHES = {"data": (8, 1, 1, 1), "fsdp": (1, 8, 1, 1), "tensor": (1, 4, 1, 2), "context": (2, 1, 4, 1)}
_PROGRAM = """
import json, sys
sys.path.insert(0, "tests/training")
from conftest import TINY
from test_step import _MESHES, losses
import jax
TINY["ensemble"].update(normalizers=("lp(p=2)", "linf"), seeds=(0,))
found = {}
for name, sizes in _MESHES.items():
    TINY["mesh"] = dict(zip(("data", "fsdp", "context", "tensor"), sizes))
    found[name] = losses(TINY).tolist()
print(json.dumps([jax.device_count(), found]))
"""


def losses(config, num_steps=4):
    """Losses in the first stage, (step, member)."""
    setup = Setup(*parse_config(config))
    state = setup.init_state()
    train_step = setup.train_step(setup.task.stages[0])
    found = []
    for _ in range(num_steps):
        state, metrics = train_step(state, None)
        found.append(metrics["loss"])
    assert state.step == num_steps
    return np.array(found)


def test_members_train_as_they_would_alone(tiny):
    together = losses(tiny)
    labels = [(spec, seed) for spec in ("lp(p=1)", "lp(p=2)", "linf") for seed in (0, 1)]
    tiny["ensemble"]["members_at_once"] = 1
    for spec, seed in (("lp(p=2)", 1), ("linf", 0)):
        tiny["ensemble"].update(normalizers=(spec,), seeds=(seed,))
        alone = losses(tiny)
        np.testing.assert_allclose(together[:, labels.index((spec, seed))], alone[:, 0], rtol=1e-4)


def test_members_of_one_seed_are_paired_and_seeds_are_not(tiny):
    tiny["ensemble"].update(normalizers=("lp(p=1)", "lp(p=2)"), seeds=(3, 4))
    state = Setup(*parse_config(tiny)).init_state()
    for leaf in jax.tree.leaves(state.params):
        np.testing.assert_array_equal(leaf[:2], leaf[2:])
    kernel = state.params[0]["head"]["kernel"]
    assert jnp.all(kernel[0] != kernel[1])
    # With an embedding of zeros the loss of the first step is that of the labels: equal only for equal data.
    first = losses(tiny, num_steps=1)[0]
    assert first[0] != first[1]


def test_one_step_follows_the_gradient(tiny):
    """The first update of Adam is the sign of the gradient, times the warmed-up learning rate."""
    tiny["ensemble"].update(normalizers=("lp(p=2)",), seeds=(0,))
    tiny["optimizer"].update(weight_decay=0.0, clip_norm=1e9)
    setup = Setup(*parse_config(tiny))
    state = setup.init_state()
    before = jax.device_get(state.params[0])
    state, metrics = setup.train_step(setup.task.stages[0])(state, None)
    rate = 3e-3 / 2  # the first of two warm-up steps
    np.testing.assert_allclose(metrics["learning_rate"], rate, rtol=1e-6)
    moves = jax.tree.map(lambda new, old: np.abs(new - old), jax.device_get(state.params[0]), before)
    np.testing.assert_allclose(moves["head"]["bias"], rate, rtol=1e-3)
    assert max(np.max(move) for move in jax.tree.leaves(moves)) < rate * 1.001


@pytest.mark.slow
def test_eight_devices_give_the_losses_of_one(tiny):
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    environment["PYTHONPATH"] = os.getcwd()
    output = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, check=True, capture_output=True, text=True
    ).stdout
    tiny["ensemble"].update(normalizers=("lp(p=2)", "linf"), seeds=(0,))
    num_devices, found = json.loads(output.splitlines()[-1])
    assert num_devices == 8
    expected = losses(tiny)
    for name in _MESHES:
        np.testing.assert_allclose(found[name], expected, rtol=1e-4, err_msg=name)
