"""Attention in tiles of queries for rules that ask for whole rows: restrictions, dropout, memory.

Values and gradients of every such rule are compared with its oracle in tests/contract/test_formulas.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import attnorm
from attnorm import chunked
from tests.contract.helpers import assert_near, make_arrays
from tests.contract.test_memory import largest_array

T, S = 40, 53
attend = functools.partial(attnorm.dot_product_attention, implementation="chunked", precision="highest")
reference = functools.partial(attnorm.dot_product_attention, implementation="reference", precision="highest")


@pytest.fixture
def small_tiles():
    """Three tiles, the last partly filled."""
    with chunked.block_sizes(chunked.BlockSizes(16, 24)):
        yield


OPTIONS = {
    "query_segment_ids": np.repeat([[0, 1, 2, 5]], 10, axis=1).repeat(2, 0).astype(np.int32),
    "key_value_segment_ids": (np.arange(S)[None].repeat(2, 0) * 3 // S).astype(np.int32),
    "query_seq_lengths": np.array([T, 21], np.int32),
    "mask": np.random.default_rng(4).random((2, 1, T, S)) < 0.7,
    "is_causal": True,
    "query_offset": np.array([13, -5], np.int32),
    "logits_soft_cap": 4.0,
    "dropout_rate": 0.3,
    "dropout_rng": jax.random.key(0),
    "normalizer": "stick_breaking",
}


def program(attend, options):
    def loss(query, key, value, bias):
        output = attend(query, key, value, bias, **options)
        return jnp.sum(jnp.sin(output)), output

    return jax.grad(loss, range(4), has_aux=True)


def test_restrictions_bias_and_dropout_are_those_of_the_reference(small_tiles):
    query, key, value = make_arrays(T=T, S=S, H=8)
    bias = np.random.default_rng(3).normal(size=(1, 4, T, S)).astype(np.float32)
    arrays = 2 * query, key, value, bias
    got, expected = (jax.jit(program(attend, OPTIONS))(*arrays) for attend in (attend, reference))
    assert np.abs(expected[0][3]).max() > 0.01
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_near("result", a, b, 2e-6)


@pytest.mark.slow
def test_mapped_rematerialised_and_sharded_gradients_are_the_plain_ones(small_tiles):
    rng = np.random.default_rng(0)
    shapes = (1, T, 2, 8), (1, S, 1, 8), (1, S, 1, 8), (1, 2, 1, S)
    many = [rng.normal(size=(2, *shape)).astype(np.float32) for shape in shapes]
    first = [x[0] for x in many]
    options = {"normalizer": "l2_gelu", "is_causal": True, "query_offset": 13}
    own = program(jax.checkpoint(functools.partial(attend, **options)), {})
    expected = jax.jit(jax.vmap(program(reference, options)))(*many)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(
        own, mesh=mesh, in_specs=(split, split, split, whole), out_specs=((split, split, split, whole), split)
    )
    for a, b in zip(jax.tree.leaves(jax.jit(jax.vmap(own))(*many)), jax.tree.leaves(expected), strict=True):
        assert_near("mapped", a, b, 1e-5)
    for a, b in zip(jax.tree.leaves(jax.jit(sharded)(*first)), jax.tree.leaves(expected), strict=True):
        assert_near("sharded", a, b[0], 1e-5)


def test_no_step_of_the_backward_pass_makes_a_whole_bias(small_tiles):
    """Gradients of whole keys and values it does make: a bias that has more numbers than these gives them away."""
    query, key, value = make_arrays(T=T, S=S, H=8)
    bias = np.zeros((2, 4, T, S), np.float32)
    program_of_gradients = jax.make_jaxpr(program(attend, {"normalizer": "top_k"}))(query, key, value, bias)
    loops = [equation for equation in program_of_gradients.jaxpr.eqns if equation.primitive.name == "scan"]
    assert len(loops) == 2
    for loop in loops:
        assert largest_array(loop.params["jaxpr"].jaxpr) < bias.size == 2 * 4 * T * S


@pytest.mark.parametrize("name", ["stick_breaking", "top_k", "adaptive_temperature"])
def test_no_array_of_length_times_length(name):
    length = 2048
    arrays = make_arrays(B=1, T=length, S=length, N=1, K=1, H=8)

    def both(*arrays):
        return jax.value_and_grad(lambda *x: attend(*x, normalizer=name, is_causal=True).sum(), (0, 1, 2))(
            *arrays
        )

    assert largest_array(jax.make_jaxpr(both)(*arrays).jaxpr) <= length * length / 4
