"""Attention on eight virtual devices: the same values and gradients as on one, and nothing gathered."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm

ROOT = Path(__file__).parents[1]
PROLOGUE = """
import functools
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import attnorm

assert jax.device_count() == 8
query, key, value = jax.random.normal(jax.random.key(0), (3, 4, 24, 4, 8))
key, value = key[:, :, :2], value[:, :, :2]
mask = jax.random.bernoulli(jax.random.key(1), 0.7, (1, 4, 24, 24))
b = jnp.array([0.0, 1.0, -1.0, 2.0])
lengths = [5, 24, 13, 0]

def loss(attention, query, key, value, b):
    output, log_norm = attention(
        query, key, value, mask=mask, is_causal=True, key_value_seq_lengths=lengths, return_log_norm=True,
        normalizer=attnorm.get_normalizer("sink", b=b), precision="highest")
    return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(log_norm))

def grad(attention):
    return jax.jit(jax.value_and_grad(functools.partial(loss, attention), argnums=(0, 1, 2, 3)))

def mesh(kind):
    return jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(kind,) * 2)

def assert_near(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-5), a, b)

SPEC = P("data", None, "tensor", None)
reference = grad(functools.partial(attnorm.dot_product_attention, implementation="reference"))
expected = reference(query, key, value, b)
"""
CASES = {
    "auto": """
attention = attnorm.sharded(attnorm.dot_product_attention, mesh(AxisType.Auto), "data", "tensor")
assert_near(grad(attention)(query, key, value, b), expected)
""",
    "auto_with_bound_options": """
rule = attnorm.get_normalizer("lp", p=jnp.array([1.0, 1.5, 2.0, 3.0]))
options = dict(normalizer=rule, key_value_seq_lengths=lengths, return_log_norm=True)
bound = functools.partial(attnorm.dot_product_attention, **options)
attention = attnorm.sharded(bound, mesh(AxisType.Auto), "data", "tensor")
assert_near(attention(query, key, value), attnorm.dot_product_attention(query, key, value, **options))
""",
    "each_device_drops_its_own": """
eye = jnp.broadcast_to(jnp.eye(16)[None, :, None], (4, 16, 4, 16))
bound = functools.partial(attnorm.dot_product_attention, normalizer="softmax", dropout_rate=0.5,
                          dropout_rng=jax.random.key(0))
kept = attnorm.sharded(bound, mesh(AxisType.Auto), "data", "tensor")(0 * eye, 0 * eye, eye) > 0
patterns = {np.asarray(kept[i, :, n]).tobytes() for i in range(4) for n in range(4)}
assert len(patterns) == 16
""",
    "explicit": """
devices = mesh(AxisType.Explicit)
placed = [jax.device_put(x, NamedSharding(devices, SPEC)) for x in (query, key, value)]
with jax.set_mesh(devices):
    program = grad(attnorm.dot_product_attention).lower(*placed, b).compile()
    assert_near(program(*placed, b), expected)
    text = program.as_text()
    assert "all-gather" not in text and "all-to-all" not in text
    weights = attnorm.attention_weights(*placed[:2], is_causal=True)
assert_near(weights, attnorm.attention_weights(query, key, is_causal=True))
assert attnorm.dot_product_attention(*placed).sharding.spec == SPEC
""",
    "shard_map": """
def summed(query, key, value):
    return jnp.sum(jnp.sin(attnorm.dot_product_attention(query, key, value, is_causal=True)))

expected = jax.grad(summed, argnums=(0, 1, 2))(query, key, value)
for check_vma in (True, False):
    local = jax.shard_map(jax.grad(summed, argnums=(0, 1, 2)), mesh=mesh(AxisType.Auto), in_specs=(SPEC,) * 3,
                          out_specs=(SPEC,) * 3, check_vma=check_vma)
    assert_near(jax.jit(local)(query, key, value), expected)
""",
    "refused": """
def refuses(function, *fragments):
    try:
        function()
    except ValueError as error:
        assert all(fragment in str(error) for fragment in fragments), error
    else:
        raise AssertionError("no error")

devices = mesh(AxisType.Auto)
refuses(lambda: attnorm.sharded(attnorm.dot_product_attention, devices, "model"), "model", "data")
refuses(lambda: attnorm.sharded(attnorm.dot_product_attention, devices, "data", "data"), "data")
attention = attnorm.sharded(attnorm.dot_product_attention, devices, "data", "tensor")
refuses(lambda: attention(query[:3], key[:3], value[:3]), "batch size B", "4", "3")
refuses(lambda: attention(query, key, value, jnp.ones((3, 1, 1, 24))), "bias", "(3, 1, 1, 24)")
devices = mesh(AxisType.Explicit)
long = jax.device_put(query, NamedSharding(devices, P(None, "data")))
refuses(lambda: attnorm.dot_product_attention(long, key, value), "query", "length T", "data")
""",
}


def test_a_function_that_has_no_implementations_is_called_as_it_is():
    def attention(query, key, value, *, scale):
        return scale * value

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    value = jnp.arange(8.0).reshape(1, 2, 2, 2)
    found = attnorm.sharded(functools.partial(attention, scale=3.0), mesh, "data")(value, value, value)
    np.testing.assert_array_equal(found, 3 * value)


@pytest.mark.parametrize("case", CASES)
def test_on_eight_devices(case):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    subprocess.run(
        [sys.executable, "-c", PROLOGUE + CASES[case]],
        check=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )
