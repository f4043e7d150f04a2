"""Every feature of the TPU kernels compiles, forward and backward, for real chips; no TPU is needed.

Needs libtpu, which comes with the extra ``tpu``.
"""

import functools
import os

# Before libtpu is loaded: there is no machine to ask, and several processes may load it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import attnorm
from attnorm import kernels
from attnorm.kernels import tpu
from attnorm.masks import Visibility
from tests.kernels.features import FEATURES, B, S, T, floats, ints, make_call

pytest.importorskip("libtpu")
pytestmark = pytest.mark.slow

BLOCKS = kernels.BlockSizes(128, 256)
SMALL = kernels.Config(forward=BLOCKS, backward=BLOCKS)
KERNEL = 'custom_call_target="tpu_custom_call"'


@functools.cache
def make_mesh(topology, devices=1, kind=AxisType.Auto):
    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return Mesh(np.array(description.devices[:devices]), ("data",), axis_types=(kind,))


def with_gradients(attend):
    """(arrays, rule) -> the results and the gradients of all that is floating point."""

    def function(arrays, rule):
        differentiable = {k: x for k, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}
        results, pullback = jax.vjp(lambda x, rule: attend(arrays | x, rule), differentiable, rule)
        return results, pullback(results)

    return function


def compile_for(topology, function, *arguments, config=SMALL, devices=1, specs=None):
    """The program's text, compiled for these chips."""
    mesh = make_mesh(topology, devices)
    with kernels.config(config), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        sharding = NamedSharding(mesh, specs or PartitionSpec())
        return jax.jit(function, in_shardings=sharding).lower(*arguments).compile().as_text()


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature):
    attend, arrays, rule = make_call(feature, implementation="pallas_tpu")
    program = compile_for("v5e:2x2", with_gradients(attend), arrays, rule)
    assert program.count(KERNEL) == (3 if "bias" in arrays else 2)


def test_bfloat16_compiles_where_the_default_precision_is_highest():
    """For which Mosaic has no product of two bytes."""
    attend, arrays, rule = make_call("causal: T != S", implementation="pallas_tpu")
    with jax.default_matmul_precision("highest"):
        compile_for("v5e:2x2", with_gradients(attend), arrays, rule)


CHIPS = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]


def attend(normalizer="l2", **constants):
    """The attention as a function of a dict of arrays and a rule, which is unused."""

    def function(arrays, rule=None):
        return attnorm.dot_product_attention(
            **arrays, **constants, normalizer=normalizer, implementation="pallas_tpu"
        )

    return function


def inputs(T, S, H, dtype=jnp.bfloat16, N=2, K=1):
    shapes = dict(query=(B, T, N, H), key=(B, S, K, H), value=(B, S, K, H))
    return {name: floats(*shape, dtype=dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "topology, normalizer",
    [(chip, "l2") for chip in CHIPS] + [("v4:2x2x1", "softplus"), ("v5p:2x2x1", "softplus")],
)
def test_default_blocks_fit_every_chip(topology, normalizer):
    arrays = inputs(T=2048, S=2048, H=128)
    function = with_gradients(attend(normalizer, is_causal=True))
    compile_for(topology, function, arrays, None, config=kernels.Config())


@pytest.mark.parametrize("topology", CHIPS)
def test_default_blocks_fit_with_mask_and_bias(topology):
    dense = dict(mask=floats(1, 1, 1024, 1024, dtype=bool), bias=floats(1, 2, 1024, 1024, dtype=jnp.float32))
    arrays = inputs(T=1024, S=1024, H=256, dtype=jnp.float32) | dense
    compile_for(topology, with_gradients(attend()), arrays, None, config=kernels.Config())


def test_gradients_of_long_sequences_are_computed_in_chunks():
    config = kernels.Config(forward=BLOCKS, backward=BLOCKS, vmem_bytes=12 * 2**20)
    arrays = inputs(T=4096, S=4096, H=128)
    compile_for("v5e:2x2", with_gradients(attend(is_causal=True)), arrays, None, config=config)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_the_batch(check_vma):
    mesh = make_mesh("v5e:2x2", 2)
    spec = PartitionSpec("data")
    function = jax.shard_map(
        lambda arrays: with_gradients(attend(is_causal=True))(arrays, None),
        mesh=mesh,
        in_specs=spec,
        out_specs=(spec, (spec, None)),
        check_vma=check_vma,
    )
    program = compile_for("v5e:2x2", function, inputs(T, S, 64), devices=2, specs=spec)
    assert program.count(KERNEL) == 2 and "all-gather" not in program


def test_explicit_axes_over_the_batch():
    mesh = make_mesh("v5e:2x2", 2, AxisType.Explicit)
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    arrays = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for name, x in inputs(T, S, 64).items()
    }
    function = with_gradients(attend(is_causal=True))
    with kernels.config(SMALL), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        program = jax.jit(lambda arrays: function(arrays, None)).lower(arrays).compile().as_text()
    assert program.count(KERNEL) == 2 and "all-gather" not in program and "all-to-all" not in program


def test_partial_results():
    def states(arrays):
        return tpu.partial_attend(
            **arrays,
            bias=None,
            visibility=Visibility(num_queries=T, num_keys=S, right=0, offset=jnp.int32(7)),
            normalizer=attnorm.get_normalizer("l2"),
            scale=0.125,
            logits_soft_cap=None,
            precision=None,
        )

    def function(arrays):
        state, pullback = jax.vjp(states, arrays)
        return state, pullback(state)

    assert compile_for("v5e:2x2", function, inputs(T, S, 64)).count(KERNEL) == 2


MAPPED = {
    "query": {},
    "offset": dict(query_offset=ints()),
    "lengths": dict(query_seq_lengths=ints(B), key_value_seq_lengths=ints(B)),
    "segments": dict(query_segment_ids=ints(B, T), key_value_segment_ids=ints(B, S)),
}


@pytest.mark.parametrize("mapped", MAPPED)
def test_vmap(mapped):
    shared = inputs(T, S, 64)
    options = MAPPED[mapped]
    many = options or dict(query=shared.pop("query"))
    many = {k: jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for k, x in many.items()}

    def function(many, shared):
        gradients = with_gradients(attend(is_causal=True))
        return jax.vmap(lambda x: gradients(shared | x, None))(many)

    assert KERNEL in compile_for("v5e:2x2", function, many, shared)


@pytest.mark.parametrize("saves, expected", [((), 3), (("attnorm_output", "attnorm_row_state"), 2)])
def test_remat_runs_the_forward_kernel_once_more_or_not_at_all(saves, expected):
    policy = jax.checkpoint_policies.save_only_these_names(*saves)
    loss = jax.checkpoint(lambda arrays: jnp.sum(attend()(arrays) ** 2), policy=policy)
    program = compile_for("v5e:2x2", jax.value_and_grad(loss), inputs(T, S, 64))
    assert program.count(KERNEL) == expected
