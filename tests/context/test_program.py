"""What is compiled for a split sequence, how it composes with JAX, and how long sequences may be."""

import jax
import pytest

pytestmark = pytest.mark.slow

PROLOGUE = """
import functools, re
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import attnorm
from attnorm.context import unzigzag, zigzag

query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 64, 4, 8))
key, value = key[:, :, :2], value[:, :, :2]
b = jnp.array([0.0, 1.0, -1.0, 2.0])
ids = jnp.repeat(jnp.array([[0, 1], [2, 0]]), 32, axis=1)
options = dict(is_causal=True, query_segment_ids=ids, precision="highest")

def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("context", "tensor"), axis_types=(kind,) * 2)

def ring(mesh, **more):
    return functools.partial(attnorm.ring_attention, mesh=mesh, head_axes="tensor", **(options | more))

def gradients(attention):
    def loss(query, key, value, b):
        output, log_norm = attention(
            query, key, value, normalizer=attnorm.get_normalizer("sink", b=b), return_log_norm=True)
        return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.cos(log_norm))

    return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))

def assert_near(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), a, b)

alone = functools.partial(attnorm.dot_product_attention, **options)
expected = jax.jit(gradients(alone))(query, key, value, b)
"""
CASES = {
    # Inputs and outputs stay split as they are, and nothing but neighbours' blocks is sent.
    "collectives": """
split = NamedSharding(mesh(), P(None, "context", "tensor"))
arrays = [jax.device_put(x, split) for x in (query, key, value)]
program = jax.jit(gradients(ring(mesh()))).lower(*arrays, b).compile()
loss, (*d_arrays, d_b) = program(*arrays, b)
assert_near((loss, (*d_arrays, d_b)), expected)
assert all(x.sharding.is_equivalent_to(split, 4) for x in d_arrays)
text = program.as_text()
assert "collective-permute" in text
assert "all-gather" not in text and "all-to-all" not in text and "reduce-scatter" not in text
# What is summed over the mesh are the loss and the gradient of b.
sums = re.findall(r"= (\\S+|\\(.*?\\)) all-reduce", text)
assert sums and all(int(n) <= 4 for shape in sums for n in re.findall(r"\\[(\\d+)", shape)), sums
""",
    "zigzag_order": """
def in_zigzag(query, key, value, *, variant, **more):
    arrays = (zigzag(x, 4) for x in (query, key, value))
    options = dict(order="zigzag", variant=variant, query_segment_ids=zigzag(ids, 4))
    results = ring(mesh(), **options)(*arrays, **more)
    return jax.tree.map(lambda x: unzigzag(x, 4), results)

for variant in ("ring", "all_gather"):
    attention = functools.partial(in_zigzag, variant=variant)
    assert_near(jax.jit(gradients(attention))(query, key, value, b), expected)
""",
    "explicit_axes": """
devices = mesh(AxisType.Explicit)
split = NamedSharding(devices, P(None, "context", "tensor"))
placed = [jax.device_put(x, split) for x in (query, key, value)]
with jax.set_mesh(devices):
    assert_near(jax.jit(gradients(ring(devices)))(*placed, b), expected)
# 4 devices divide 12, their 8 blocks neither; of the last mesh the heads' axis alone is Explicit.
mixed = jax.make_mesh((4, 2), ("context", "tensor"), axis_types=(AxisType.Auto, AxisType.Explicit))
for T, devices in ((10, devices), (12, devices), (10, mixed)):
    arrays = [x[:, :T] for x in (query, key, value)]
    short = dict(query_segment_ids=ids[:, 26 : 26 + T])
    wanted = jax.jit(gradients(functools.partial(alone, **short)))(*arrays, b)
    with jax.set_mesh(devices):
        assert_near(jax.jit(gradients(ring(devices, **short)))(*arrays, b), wanted)
""",
    "vmap_and_remat": """
def members(query, key, value, b):
    losses, d_arrays = jax.vmap(jax.checkpoint(gradients(ring(mesh()))), in_axes=(0, None, None, 0))(
        jnp.stack([query, 0.5 * query]), key, value, jnp.stack([b, b + 1]))
    return losses, d_arrays

both = jax.jit(members)(query, key, value, b)
assert_near(jax.tree.map(lambda x: x[0], both), expected)
assert_near(jax.tree.map(lambda x: x[1], both), jax.jit(gradients(alone))(0.5 * query, key, value, b + 1))
""",
    "bfloat16": """
narrow = [x.astype(jnp.bfloat16) for x in (query, key, value)]
wide = [x.astype(jnp.float32) for x in narrow]
output = jax.jit(ring(mesh(), normalizer="l2"))(*narrow)
assert output.dtype == jnp.bfloat16
one_device = jax.jit(functools.partial(alone, normalizer="l2"))
wanted = one_device(*wide)
# Parts travel and merge in float32: no less exact than one device.
error, error_of_one = (jnp.max(jnp.abs(x.astype(jnp.float32) - wanted)) for x in (output, one_device(*narrow)))
assert error <= 1.25 * error_of_one, (error, error_of_one)

got = jax.jit(gradients(ring(mesh())))(*narrow, b)[1]
wanted = jax.jit(gradients(alone))(*wide, b)[1]
for narrow_gradient, gradient in zip(got[:3], wanted[:3], strict=True):
    assert narrow_gradient.dtype == jnp.bfloat16
    error = np.max(np.abs(narrow_gradient.astype(jnp.float32) - gradient))
    assert error <= 2**-6 * np.max(np.abs(gradient)), error
""",
    "hidden_nan": """
hidden = jnp.arange(64)[:, None, None] >= 48
poisoned = [jnp.where(hidden, jnp.nan, x) for x in (key, value)]
lengths = jnp.array([48, 40])
limited = dict(key_value_seq_lengths=lengths)
got = jax.jit(gradients(ring(mesh(), **limited)))(query, *poisoned, b)
assert_near(got, jax.jit(gradients(functools.partial(alone, **limited)))(query, key, value, b))
""",
    # Of hidden queries neither the numbers nor the cotangents reach anything.
    "hidden_nan_queries": """
limited = dict(query_seq_lengths=jnp.array([48, 40]), return_log_norm=True)
hidden = jnp.arange(64)[:, None] >= limited["query_seq_lengths"][:, None, None]
poisoned = jnp.where(hidden[..., None], jnp.nan, query)
d_output = jax.random.normal(jax.random.key(1), query.shape)
d_log_norm = jax.random.normal(jax.random.key(2), query.shape[:3])

def pulled(attention, query, d_output, d_log_norm):
    def function(query, key, value, b):
        return attention(query, key, value, normalizer=attnorm.get_normalizer("sink", b=b), **limited)

    (output, log_norm), pull = jax.vjp(function, query, key, value, b)
    return output, jnp.where(hidden, 0, log_norm), pull((d_output, d_log_norm))

clean = [jnp.where(hidden[..., None], 0, d_output), jnp.where(hidden, 0, d_log_norm)]
# The log-norm of a query that sees nothing is b, so what comes back to it is b's.
marked = [jnp.where(hidden[..., None], jnp.nan, d_output), clean[1]]
got = jax.jit(functools.partial(pulled, ring(mesh())))(poisoned, *marked)
assert_near(got, jax.jit(functools.partial(pulled, alone))(query, *clean))
""",
}


@pytest.mark.parametrize("case", CASES)
def test_on_eight_devices(on_devices, case):
    on_devices(8, "-c", PROLOGUE + CASES[case])


LONG = """
import resource
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import attnorm

T, N, H = 131_072, 2, 64
mesh = jax.make_mesh((8,), ("context",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
query, cotangent = rng.normal(size=(2, 1, T, N, H)).astype(np.float32)
key, value = rng.normal(size=(2, 1, T, 1, H)).astype(np.float32)
place = lambda x: jax.device_put(x, NamedSharding(mesh, P(None, "context")))

@jax.jit
def run(query, key, value, cotangent):
    attend = lambda *arrays: attnorm.ring_attention(*arrays, mesh=mesh, is_causal=True, return_log_norm=True)
    (output, log_norm), pull = jax.vjp(attend, query, key, value)
    return output, log_norm, *pull((cotangent, jnp.zeros_like(log_norm)))

results = jax.block_until_ready(run(*map(place, (query, key, value, cotangent))))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # before the check, which is in float64
results = [np.asarray(x, np.float64)[0] for x in results]
output, log_norm, dq, dk, dv = results
q, d_out = query[0].astype(np.float64), cotangent[0].astype(np.float64)
k, v = key[0, :, 0].astype(np.float64), value[0, :, 0].astype(np.float64)
scale = H**-0.5

def near(got, expected):
    assert np.max(np.abs(got - expected)) <= 1e-5 * max(1, np.max(np.abs(expected)))

# Rows of the first and the last device, and of a boundary between blocks; each against all that it sees.
for i in (0, 1, T // 16 - 1, T // 16, 5 * T // 9, T - 1):
    for n in range(N):
        weights = np.exp(scale * (k[: i + 1] @ q[i, n]))
        weights /= np.linalg.norm(weights)
        near(output[i, n], weights @ v[: i + 1])
        slopes = weights * (v[: i + 1] @ d_out[i, n] - weights * (output[i, n] @ d_out[i, n]))
        near(dq[i, n], scale * slopes @ k[: i + 1])
# Keys, whose gradients have come from all devices; the rows' own numbers were just seen to be right.
for j in (0, T // 16 - 1, 3 * T // 8, T - 1):
    weights = np.exp(scale * np.einsum("tnh,h->tn", q[j:], k[j]) - log_norm[j:])
    delta = np.einsum("tnh,tnh->tn", output[j:], d_out[j:])
    slopes = weights * (np.einsum("tnh,h->tn", d_out[j:], v[j]) - weights * delta)
    near(dv[j], np.einsum("tn,tnh->h", weights, d_out[j:])[None])
    near(dk[j], scale * np.einsum("tn,tnh->h", slopes, q[j:])[None])
print(peak)
"""


def test_a_long_sequence_fits_in_memory(on_devices):
    """131,072 tokens, forward and backward, of a causal mask."""
    peak_kilobytes = int(on_devices(8, "-c", LONG, compile_flags="").split()[-1])
    assert peak_kilobytes < 8e6


KERNELS = """
from jax.experimental.pallas import tpu as pltpu
from attnorm import kernels

mesh = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))
attention = functools.partial(
    attnorm.ring_attention, mesh=mesh, is_causal=True, precision="highest", implementation="pallas_tpu")
query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 64, 2, 8))
key, value = key[:, :, :1], value[:, :, :1]
b = b[:2]
blocks = kernels.BlockSizes(128, 128)
with kernels.config(kernels.Config(forward=blocks, backward=blocks, interpret=pltpu.InterpretParams())):
    got = jax.jit(gradients(attention))(query, key, value, b)
alone = functools.partial(attnorm.dot_product_attention, is_causal=True, precision="highest")
assert_near(got, jax.jit(gradients(alone))(query, key, value, b))
"""


# As for the kernels without a ring: only these simulated devices know varying axes.
@pytest.mark.skipif(
    jax.__version_info__ < (0, 11), reason="before 0.11 the simulated devices wait for each other for ever"
)
def test_tpu_kernels_compute_the_tiles(on_devices):
    on_devices(2, "-c", PROLOGUE.partition("expected =")[0] + KERNELS)
