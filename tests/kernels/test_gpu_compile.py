"""Features of the GPU kernels compile, forward and backward, to machine code for Hopper; no GPU is needed.

Needs JAX 0.12, its CUDA plugin (``pip install "jax[cuda13-local]"``) and NVIDIA's assembler: that of a CUDA 13 toolkit
or, without one, ``pip install nvidia-cuda-nvcc nvidia-nvvm``. JAX_PLATFORMS=cpu keeps JAX from looking for a GPU.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from attnorm import _compat
from tests.kernels import gpu_targets
from tests.kernels.features import N, call_of, floats, make_call
from tests.kernels.gpu_targets import with_gradients

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax[cuda13-local]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _compat.HAS_MOSAIC_GPU, reason="the kernels need JAX 0.12"),
]


@pytest.fixture(scope="module")
def target():
    return gpu_targets.target("H100")


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
    "normalizer": [
        "softmax",
        "lp",
        "linf",
        "sink",
        "softplus",
        "softpick",
        "squared_relu",
        "reluformer",
    ],
}
FEATURES = [f"{row}: {name}" for row, names in SAMPLED.items() for name in names]
PER_HEAD = floats(N, dtype=jnp.float32)
RULES = {
    # Alone, its backward kernels are those of reluformer, and would not be compiled again.
    "relu": dict(normalizer="relu", is_causal=True, rule=dict(alpha=PER_HEAD)),
    "sigmoid with a bias": dict(normalizer="sigmoid", rule=dict(b=PER_HEAD)),
    "polynomial of degree 1": dict(normalizer="polynomial", rule=dict(k=1)),
    "sigmoid over its norm": dict(normalizer="general", rule=dict(F="sigmoid", p=3.0)),
    "1 + s² over its norm": dict(
        normalizer="general", rule=dict(F="one_plus_square", p=PER_HEAD, T=PER_HEAD)
    ),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature, target, monkeypatch, capfd):
    most_spilled = 128 if feature == "normalizer: softpick" else 0
    check(*make_call(feature, implementation="pallas_gpu"), target, monkeypatch, capfd, most_spilled)


@pytest.mark.parametrize("name", RULES)
def test_rule(name, target, monkeypatch, capfd):
    check(*call_of(RULES[name], implementation="pallas_gpu"), target, monkeypatch, capfd)


def check(call, arrays, rule, target, monkeypatch, capfd, most_spilled=0):
    """Softpick alone may spill a little: its slopes take more numbers than a thread has registers."""
    kernels = compile_kernels(with_gradients(call), arrays, rule, target, monkeypatch, capfd)
    assert len(kernels) in (3, 4) and {name.startswith("attnorm_gpu_") for name in kernels} == {True}
    for name, (products, spilled) in kernels.items():
        assert products > 0 and spilled <= most_spilled, f"{name}: {products} wgmma, {spilled} bytes spilled"


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
