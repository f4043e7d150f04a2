"""The kernels on several virtual devices: the same values and gradients as the reference on one."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PROLOGUE = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import attnorm
from attnorm import kernels

shape, interpret = {shape}, {interpret}
query, key, value = jax.random.normal(jax.random.key(0), (3, 4, 24, 4, 8))
key, value = key[:, :, :2], value[:, :, :2]
p = jnp.array([1.0, 1.5, 2.0, 3.0])
SPEC = P("data", None, "tensor", None)

def loss(implementation, query, key, value, p):
    rule = attnorm.get_normalizer("lp", p=p)
    options = dict(is_causal=True, normalizer=rule, precision="highest", implementation=implementation)
    return jnp.sum(jnp.sin(attnorm.dot_product_attention(query, key, value, **options)))

gradients = jax.grad(functools.partial(loss, "pallas_tpu"), argnums=(0, 1, 2, 3))
expected = jax.grad(functools.partial(loss, "reference"), argnums=(0, 1, 2, 3))(query, key, value, p)

def mesh(kind):
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=(kind,) * 2)

def check(function, *arrays):
    blocks = kernels.BlockSizes(128, 128)
    with kernels.config(kernels.Config(forward=blocks, backward=blocks, interpret=interpret)):
        got = jax.jit(function)(*arrays)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)

def shard_map(check_vma):
    def local(query, key, value, p):
        *arrays, d_p = gradients(query, key, value, p)
        # With check_vma the gradient of p, which is the same on all of "data", is summed over it already.
        return *arrays, d_p if check_vma else jax.lax.psum(d_p, "data")

    specs = (SPEC,) * 3 + (P("tensor"),)
    return jax.shard_map(
        local, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=specs, check_vma=check_vma
    )
"""
UNCHECKED = "check(shard_map(check_vma=False), query, key, value, p)"
CHECKED = "check(shard_map(check_vma=True), query, key, value, p)"
EXPLICIT = """
devices = mesh(AxisType.Explicit)
placed = [jax.device_put(x, NamedSharding(devices, SPEC)) for x in (query, key, value)]
with jax.set_mesh(devices):
    check(gradients, *placed, p)
"""


def run(program, shape, interpret):
    count = shape[0] * shape[1]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    subprocess.run(
        [
            sys.executable,
            "-c",
            PROLOGUE.replace("{shape}", str(shape)).replace("{interpret}", interpret) + program,
        ],
        check=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )


def test_shard_map_over_batch_and_heads():
    run(UNCHECKED, shape=(4, 2), interpret="True")


# The plain interpreter has no rules for varying axes; the one that simulates copies does.
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="before 0.11 the simulated devices wait for each other for ever"
)
@pytest.mark.parametrize("program", [CHECKED, EXPLICIT], ids=["check_vma", "explicit axes"])
def test_varying_axes_are_declared(program):
    run(program, shape=(2, 1), interpret="pltpu.InterpretParams()")
