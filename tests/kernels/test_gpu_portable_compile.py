"""Features of the portable GPU kernels compile, forward and backward, to machine code for cards that are not here.

It needs what test_gpu_compile.py says.
"""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from attnorm import _compat, kernels
from tests.kernels import gpu_targets
from tests.kernels.features import N, call_of, floats, make_call

pytest.importorskip("jax_plugins.xla_cuda13", reason="needs jax[cuda13-local]")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _compat.HAS_PALLAS_TRITON, reason="this JAX has no Triton backend of Pallas"),
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


# One or a few of every row of the contract; a bias goes elsewhere for its gradient.
SAMPLED = {
    "causal": ["T > S"],
    "offset": ["per batch"],
    "window": ["both sides"],
    "lengths": ["both"],
    "segments": ["both"],
    "mask": ["(2, 4, 300, 400)", "(1, 1, 300, 1)"],
    "logits": ["soft cap"],
    "heads": ["three query heads per key head"],
    "head dims": ["40", "16 and 256"],
    "lengths of arrays": ["one query"],
    "dtype": ["float16"],
    "normalizer": ["lp", "linf", "sink", "softplus", "softpick"],
}


@pytest.mark.parametrize("feature", [f"{row}: {name}" for row, names in SAMPLED.items() for name in names])
def test_feature(feature):
    check(*make_call(feature, implementation="pallas_gpu"), "A100")


# L4 has the least shared memory.
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda x: x.dtype.name)
@pytest.mark.parametrize("width", [64, 128, 256])
def test_tiles_fit_the_smallest_card(width, dtype):
    case = dict(is_causal=True, dtype=dtype, shape=dict(H=width, Hv=width))
    check(*call_of(case, implementation="pallas_gpu"), "L4")


@pytest.mark.parametrize("width", [64, 128, 256])
def test_float32_multiplied_exactly(width):
    case = dict(precision="highest", is_causal=True, dtype=jnp.float32, shape=dict(H=width, Hv=width))
    check(*call_of(case, implementation="pallas_gpu"), "L4")


@pytest.mark.parametrize("card", ["H100", "B200"])
def test_newer_cards(card):
    check(*make_call("head dims: 128", implementation="pallas_gpu"), card)


def test_bias_in_the_forward_kernel():
    call = make_call("together: everything", implementation="pallas_gpu")
    check(*call, "A100", {"attnorm_triton_forward"})


@pytest.mark.parametrize("name, rule", [("sigmoid", dict(b=floats(N, dtype=jnp.float32))), ("general", {})])
def test_rule(name, rule):
    check(*call_of(dict(normalizer=name, rule=rule), implementation="pallas_gpu"), "A100")
