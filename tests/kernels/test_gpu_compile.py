"""Features of the GPU kernels compile, forward and backward, to machine code for Hopper; no GPU is needed.

Needs JAX 0.12, its CUDA plugin (``pip install "jax[cuda13-local]"``) and NVIDIA's assembler: that of a CUDA 13 toolkit
or, without one, ``pip install nvidia-cuda-nvcc nvidia-nvvm``. JAX_PLATFORMS=cpu keeps JAX from looking for a GPU.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from attnorm import _compat
from tests.kernels.features import make_call

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax[cuda13-local]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _compat.HAS_MOSAIC_GPU, reason="the kernels need JAX 0.12"),
]

# What the compiler asks of a device: an H100 with 80 GB.
H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: 1.98
  device_memory_size: 85899345920
  l2_cache_size: 52428800
  memory_bandwidth: 3350000000000
}
platform_name: "CUDA"
runtime_version { major: 13 minor: 0 patch: 0 }
dnn_version_info { major: 9 minor: 12 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@pytest.fixture(scope="module")
def target():
    """A place to compile for: -> an abstract mesh, and the sharding of everything."""
    topology = topologies.get_topology_desc("", platform="cuda", target_config=H100, topology="1x1x1")
    device = AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="cuda")
    mesh = AbstractMesh((1,), ("d",), (AxisType.Auto,), abstract_device=device)
    return mesh, NamedSharding(Mesh(np.array(topology.devices), ("d",)), PartitionSpec())


def compile_kernels(function, arrays, rule, target, monkeypatch, capfd):
    """-> {kernel: (matrix instructions, bytes spilled)}."""
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    mesh, sharding = target

    with jax.sharding.use_abstract_mesh(mesh):
        jax.jit(function, in_shardings=sharding).lower(arrays, rule).compile()
    text = "".join(capfd.readouterr())
    products = {
        body.split("(")[0].strip(): body.count("wgmma.mma_async")
        for body in text.split(".visible .entry")[1:]
    }
    spilled = re.findall(
        r"Function properties for (\S+)\s+.*?(\d+) bytes spill stores, (\d+) bytes spill", text
    )
    return {name: (products[name], int(stores) + int(loads)) for name, stores, loads in spilled}


def with_gradients(call):
    def value_and_gradients(arrays, rule):
        floats, others = {}, {}
        for name, x in arrays.items():
            (floats if jnp.issubdtype(x.dtype, jnp.floating) else others)[name] = x
        results, pull = jax.vjp(lambda floats, rule: call(floats | others, rule), floats, rule)
        return results, pull(jax.tree.map(jnp.ones_like, results))

    return value_and_gradients


# One or a few of every row of the contract; what float32 kernels would be for is refused, a bias goes elsewhere.
SAMPLED = {
    "causal": ["T > S"],
    "offset": ["per batch"],
    "window": ["both sides", "left"],
    "lengths": ["both"],
    "segments": ["both"],
    "mask": ["(2, 4, 300, 400)", "(1, 1, 300, 1)", "(1, 4, 1, 1)"],
    "logits": ["soft cap"],
    "heads": ["three query heads per key head"],
    "head dims": ["40", "128", "192 and 40", "16 and 256"],
    "lengths of arrays": ["one query"],
    "dtype": ["float16"],
    "normalizer": ["softmax", "lp", "linf", "sink", "softplus"],
}
FEATURES = [f"{row}: {name}" for row, names in SAMPLED.items() for name in names]


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature, target, monkeypatch, capfd):
    call, arrays, rule = make_call(feature, implementation="pallas_gpu")
    kernels = compile_kernels(with_gradients(call), arrays, rule, target, monkeypatch, capfd)
    assert len(kernels) in (3, 4) and {name.startswith("attnorm_gpu_") for name in kernels} == {True}
    for name, (products, spilled) in kernels.items():
        assert products > 0 and spilled == 0, f"{name}: {products} wgmma, {spilled} bytes spilled"


def test_bias_in_the_forward_kernel(target, monkeypatch, capfd):
    call, arrays, rule = make_call("together: everything", implementation="pallas_gpu")
    kernels = compile_kernels(call, arrays, rule, target, monkeypatch, capfd)
    ((name, (products, spilled)),) = kernels.items()
    assert name.startswith("attnorm_gpu_forward") and products > 0 and spilled == 0


def test_inside_shard_map(target, monkeypatch, capfd):
    """Queries are split over the mesh, keys and values are not, so that their gradients are summed."""
    call, arrays, rule = make_call("causal: not", implementation="pallas_gpu")
    specs = {name: PartitionSpec("d" if name == "query" else None) for name in arrays}
    split = jax.shard_map(
        lambda arrays: call(arrays, rule), mesh=target[0], in_specs=(specs,), out_specs=PartitionSpec("d")
    )
    kernels = compile_kernels(
        with_gradients(lambda arrays, _: split(arrays)), arrays, rule, target, monkeypatch, capfd
    )
    assert len(kernels) == 3
