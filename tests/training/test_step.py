"""The jitted step: a member of an ensemble trains as it would alone, on any number of devices."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnorm.training.feed import Feed
from attnorm.training.loop import parse_config
from attnorm.training.setup import Setup

# Sizes of data, fsdp, context and tensor, by task.
_MESHES = {
    "counting": [(8, 1, 1, 1), (2, 1, 4, 1)],
    "lm": [(2, 4, 1, 1), (2, 1, 4, 1), (1, 2, 2, 2)],
}
_PROGRAM = """
import json, sys
sys.path[:0] = [".", "tests/training"]
import jax
from attnorm.training.config import ConfigError
from configs.lm import get_config
from conftest import TINY
from test_step import _MESHES, first_steps
TINY["ensemble"].update(normalizers=("lp(p=2)", "sparsemax"), seeds=(0,))
lm = get_config("runlocal").to_dict()
lm["lm"]["batch_size"], lm["accumulation_steps"] = 16, 2
lm["lm"]["model"].update(num_heads=4, features=32, norm="rms", mlp="swiglu", tie_embeddings=False)
found = {}
for config in (TINY, lm):
    for sizes in [(1, 1, 1, 1), *_MESHES[config["task"]]]:
        config["mesh"] = dict(zip(("data", "fsdp", "context", "tensor"), sizes))
        devices = jax.devices()[: sizes[0] * sizes[1] * sizes[2] * sizes[3]]
        of_mesh = first_steps(config, devices=devices)
        of_one = of_mesh if sizes == (1, 1, 1, 1) else of_one
        errors = jax.tree.map(lambda x, y: float(abs(x - y).max() / max(abs(y).max(), 1e-12)), of_mesh, of_one)
        leaves, _ = jax.tree_util.tree_flatten_with_path(errors)
        found.setdefault(config["task"], []).append({jax.tree_util.keystr(path): x for path, x in leaves})
lm["mesh"] = dict(data=1, fsdp=1, context=1, tensor=8)
try:
    first_steps(lm)
except ConfigError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


def first_steps(config, num_steps=4, devices=None):
    """Of the first stage: losses and norms of gradients, (step, member), and the mean gradient of each parameter."""
    setup = Setup(*parse_config(config), devices)
    state = setup.init_state()
    stage = setup.task.stages[0]
    train_step, feed = setup.train_step(stage), Feed(setup.task, stage, 0, setup.mesh)
    found = {"loss": [], "gradient_norm": []}
    for _ in range(num_steps):
        state, metrics = train_step(state, feed.next())
        for name, values in found.items():
            values.append(metrics[name])
    assert state.step == num_steps
    # Adam's updates are alike whatever the scale of the gradients; its first moment is not.
    gradient = [jax.device_get(optax.tree.get(of_group, "mu")) for of_group in state.optimizer_state]
    return {**{name: np.array(values) for name, values in found.items()}, "gradient": gradient}


def losses(config, num_steps=4):
    return first_steps(config, num_steps)["loss"]


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
def test_eight_devices_give_the_losses_and_gradients_of_one():
    flags = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.getcwd(),
    }
    output = subprocess.run(
        [sys.executable, "-c", _PROGRAM], env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    found = json.loads(output.splitlines()[-1])
    assert found["error"] == "config.mesh.tensor must divide the 4 query heads, got 8"
    for task, meshes in _MESHES.items():
        for mesh, errors in zip(meshes, found[task][1:], strict=True):
            assert any("kernel" in name for name in errors) and "['gradient_norm']" in errors
            # Adam moves a weight by as much for a gradient that is rounding as for one that is not.
            wrong = {name: x for name, x in errors.items() if not x < (1e-4 if name == "['loss']" else 1e-2)}
            assert not wrong, f"{task} on {mesh}: {wrong}"
