"""Features of the portable GPU kernels compile, forward and backward, to machine code for cards that are not here.

It needs what test_gpu_compile.py says.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from attnorm import _compat, kernels
from tests.kernels import gpu_targets
from tests.kernels.features import FEATURES, call_of, make_call

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax[cuda13-local]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _compat.HAS_PALLAS_TRITON, reason="this JAX has no Triton backend of Pallas"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated"),
]
NAMES = {f"attnorm_triton_{name}" for name in ("forward", "backward_query", "backward_key")}
target = functools.cache(gpu_targets.target)


def check(call, arrays, rule, card, names=NAMES):
    """The compiler refuses what does not fit into shared memory by itself, and what spills registers if asked to."""
    mesh, sharding = target(card)
    function = gpu_targets.with_gradients(call) if names == NAMES else call
    with jax.sharding.use_abstract_mesh(mesh), kernels.config(kernels.Config(gpu="portable")):
        program = jax.jit(function, in_shardings=sharding).lower(arrays, rule)
        compiled = program.compile({"xla_gpu_fail_ptx_compilation_on_register_spilling": True})
    assert set(re.findall(r'"(attnorm_triton_\w+)"', compiled.as_text())) == names


# The rule whose slopes take the most registers, and several heads to walk through; L4 has the least shared memory.
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize(
    "numbers",
    [dict(), dict(dtype=jnp.float32), dict(dtype=jnp.float32, precision="highest")],
    ids=["narrow", "rounded", "exact"],
)
def test_tiles_fit(width, numbers):
    case = dict(normalizer="softpick", is_causal=True, shape=dict(N=6, H=width, Hv=width)) | numbers
    check(*call_of(case, implementation="pallas_gpu"), "L4")


@pytest.mark.parametrize("card", ["H100", "B200"])
def test_newer_cards(card):
    check(*make_call("head dims: 128", implementation="pallas_gpu"), card)


@pytest.mark.parametrize(
    "feature",
    ["normalizer: lp", "normalizer: linf", "head dims: 192 and 40", "lengths of arrays: one query"],
)
def test_feature(feature):
    check(*make_call(feature, implementation="pallas_gpu"), "A100")


def test_all_restrictions():
    """In every kernel, but for a bias, whose gradient is elsewhere."""
    case = FEATURES["together: everything"]
    without_bias = {name: x for name, x in case.items() if name != "bias"}
    check(*call_of(without_bias, implementation="pallas_gpu"), "A100")
    check(*call_of(case, implementation="pallas_gpu"), "A100", {"attnorm_triton_forward"})


def test_inside_shard_map():
    """Queries are split over the mesh, keys and values are not, so that their gradients are summed."""
    call, arrays, rule = make_call("causal: T > S", implementation="pallas_gpu")
    specs = {name: PartitionSpec("d" if name == "query" else None) for name in arrays}
    split = jax.shard_map(
        lambda arrays: call(arrays, rule),
        mesh=target("A100")[0],
        in_specs=(specs,),
        out_specs=PartitionSpec("d"),
    )
    check(lambda arrays, _: split(arrays), arrays, rule, "A100")
