"""Every feature of the TPU kernels compiles, forward and backward, for real chips; no TPU is needed.

Needs libtpu, which comes with the extra ``tpu``.
"""

import os

# Before libtpu is loaded: there is no machine to ask, and several processes may load it.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import attnorm
from attnorm import kernels

pytest.importorskip("libtpu")
pytestmark = pytest.mark.slow

B, T, S, N, K = 2, 300, 400, 4, 2
BLOCKS = kernels.BlockSizes(128, 256)
SMALL = kernels.Config(forward=BLOCKS, backward=BLOCKS)


def floats(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def inputs(dtype=jnp.bfloat16, T=T, S=S, N=N, K=K, H=64, Hv=64):
    shapes = dict(query=(B, T, N, H), key=(B, S, K, H), value=(B, S, K, Hv))
    return {name: floats(*shape, dtype=dtype) for name, shape in shapes.items()}


BROADCASTS = [(B, N, T, S), (1, N, T, S), (B, 1, 1, S), (1, 1, T, 1), (1, N, 1, 1), (1, 1, 1, 1)]
# Arguments of the attention by feature; arrays are traced, "rule" are parameters of the normaliser.
FEATURES = {
    "plain": {},
    "causal": dict(is_causal=True),
    "offset": dict(is_causal=True, query_offset=ints()),
    "offset per batch": dict(is_causal=True, query_offset=ints(B)),
    "window": dict(local_window_size=(100, 50), query_offset=7),
    "lengths": dict(query_seq_lengths=ints(B), key_value_seq_lengths=ints(B)),
    "segments": dict(query_segment_ids=ints(B, T), key_value_segment_ids=ints(B, S)),
    "soft cap": dict(is_causal=True, logits_soft_cap=20.0),
    "scale": dict(scale=0.3),
    "p per head": dict(normalizer="lp", rule=dict(p=floats(N, dtype=jnp.float32))),
    "odd p": dict(normalizer="lp", rule=dict(p=2.5)),
    "p infinite": dict(normalizer="linf"),
    "sink per head": dict(normalizer="sink", rule=dict(b=floats(N, dtype=jnp.float32))),
    "one n": dict(normalizer="softmax_plus_n", rule=dict(n=floats(dtype=jnp.float32))),
    "float32": dict(dtype=jnp.float32, is_causal=True),
    "float32, highest": dict(dtype=jnp.float32, precision="highest", is_causal=True),
    "bfloat16, highest": dict(precision="highest", is_causal=True),
    "float16": dict(dtype=jnp.float16, is_causal=True),
    "head dims 192 and 40": dict(H=192, Hv=40),
    "one query head per key head": dict(K=N),
    "one key head": dict(K=1, is_causal=True),
    "single query and key": dict(T=1, S=1),
    "everything": dict(
        mask=floats(B, N, T, S, dtype=bool),
        bias=floats(1, N, T, S),
        is_causal=True,
        query_offset=ints(B),
        local_window_size=(300, 10),
        query_seq_lengths=ints(B),
        key_value_seq_lengths=ints(B),
        query_segment_ids=ints(B, T),
        key_value_segment_ids=ints(B, S),
        logits_soft_cap=8.0,
    ),
    **{f"mask {shape}": dict(mask=floats(*shape, dtype=bool)) for shape in BROADCASTS},
    **{f"bias {shape}": dict(bias=floats(*shape)) for shape in BROADCASTS},
}


def make_mesh(topology, devices=1):
    description = topologies.get_topology_desc(platform="tpu", topology_name=topology)
    return Mesh(np.array(description.devices[:devices]), ("data",), axis_types=(AxisType.Auto,))


def value_and_gradients(arrays, rule, constants):
    constants = dict(constants)
    name, static = constants.pop("normalizer", "l2"), constants.pop("static_rule", {})
    differentiable = {k: x for k, x in arrays.items() if jnp.issubdtype(x.dtype, jnp.floating)}

    def function(differentiable, rule):
        normalizer = attnorm.get_normalizer(name, **rule, **static)
        return attnorm.dot_product_attention(
            **arrays | differentiable,
            **constants,
            normalizer=normalizer,
            return_log_norm=True,
            implementation="pallas_tpu",
        )

    results, pullback = jax.vjp(function, differentiable, rule)
    return results, pullback(results)


def compile_for(topology, options, config=SMALL, devices=1, wrap=lambda f, mesh: f, specs=None):
    """Compiles forward and backward; returns the program's text."""
    options = dict(options)
    shape = {k: options.pop(k) for k in ("dtype", "T", "S", "N", "K", "H", "Hv") if k in options}
    rule = options.pop("rule", {})
    is_array = lambda x: isinstance(x, jax.ShapeDtypeStruct)  # noqa: E731
    arrays = inputs(**shape) | {k: x for k, x in options.items() if is_array(x)}
    constants = {k: x for k, x in options.items() if not is_array(x)}
    constants["static_rule"] = {k: x for k, x in rule.items() if not is_array(x)}
    rule = {k: x for k, x in rule.items() if is_array(x)}
    mesh = make_mesh(topology, devices)
    function = functools.partial(value_and_gradients, constants=constants)
    with kernels.config(config), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(wrap(function, mesh), in_shardings=NamedSharding(mesh, specs or PartitionSpec()))
        return jitted.lower(arrays, rule).compile().as_text()


@pytest.mark.parametrize("feature", FEATURES)
def test_feature(feature):
    program = compile_for("v5e:2x2", FEATURES[feature])
    kernels_in = program.count('custom_call_target="tpu_custom_call"')
    assert kernels_in == (3 if "bias" in FEATURES[feature] else 2)


CHIPS = ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"]


@pytest.mark.parametrize("topology", CHIPS)
def test_default_blocks_fit_every_chip(topology):
    sizes = dict(T=2048, S=2048, N=2, K=1, H=128, Hv=128)
    compile_for(topology, dict(is_causal=True, **sizes), kernels.Config())


@pytest.mark.parametrize("topology", CHIPS)
def test_default_blocks_fit_with_mask_and_bias(topology):
    dense = dict(mask=floats(1, 1, 1024, 1024, dtype=bool), bias=floats(1, 2, 1024, 1024, dtype=jnp.float32))
    sizes = dict(T=1024, S=1024, N=2, K=1, H=256, Hv=256, dtype=jnp.float32)
    compile_for(topology, dense | sizes, kernels.Config())


def test_gradients_of_long_sequences_are_computed_in_chunks():
    sizes = dict(T=4096, S=4096, N=2, K=1, H=128, Hv=128)
    config = kernels.Config(forward=BLOCKS, backward=BLOCKS, vmem_bytes=12 * 2**20)
    compile_for("v5e:2x2", dict(is_causal=True, **sizes), config)


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_over_the_batch(check_vma):
    def wrap(function, mesh):
        spec = PartitionSpec("data")
        return jax.shard_map(
            lambda arrays, rule: function(arrays, rule)[1][0],
            mesh=mesh,
            in_specs=(spec, PartitionSpec()),
            out_specs=spec,
            check_vma=check_vma,
        )

    program = compile_for("v5e:2x2", dict(is_causal=True), devices=2, wrap=wrap, specs=PartitionSpec("data"))
    assert "all-gather" not in program


def test_vmap():
    def wrap(function, mesh):
        def mapped(arrays, rule):
            return jax.vmap(lambda x: function(arrays | {"query": x}, rule))(jnp.stack([arrays["query"]] * 2))

        return mapped

    compile_for("v5e:2x2", dict(is_causal=True), wrap=wrap)


@pytest.mark.parametrize("saves, expected", [((), 3), (("attnorm_output", "attnorm_row_state"), 2)])
def test_remat_runs_the_forward_kernel_once_more_or_not_at_all(saves, expected):
    policy = jax.checkpoint_policies.save_only_these_names(*saves)
    mesh = make_mesh("v5e:2x2")

    def loss(arrays):
        return jnp.sum(attnorm.dot_product_attention(**arrays, implementation="pallas_tpu") ** 2)

    with kernels.config(SMALL), jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        gradient = jax.value_and_grad(jax.checkpoint(loss, policy=policy))
        jitted = jax.jit(gradient, in_shardings=NamedSharding(mesh, PartitionSpec()))
        program = jitted.lower(inputs()).compile().as_text()
    assert program.count('custom_call_target="tpu_custom_call"') == expected
