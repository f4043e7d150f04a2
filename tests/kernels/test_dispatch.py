"""Which implementation serves a call, block sizes, and what the kernels refuse."""

import functools
import logging
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AxisType

import attnorm
from attnorm import attention, kernels
from attnorm.kernels import settings, tile
from tests.contract.helpers import assert_near, make_arrays
from tests.kernels.conftest import INTERPRET, SMALL

DROPOUT = {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0)}


@pytest.mark.parametrize(
    "options, reason", [(DROPOUT, "dropout"), ({"precision": "BF16_BF16_F32"}, "precision")]
)
def test_a_named_kernel_that_cannot_serve_says_why(options, reason):
    if "precision" in options:
        options = {"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32}
    with pytest.raises(NotImplementedError, match=f"pallas_tpu: {reason}"):
        attnorm.dot_product_attention(*make_arrays(), implementation="pallas_tpu", **options)


def test_a_machine_without_a_tpu_is_refused():
    arrays = make_arrays(B=1, T=8, S=8)
    with pytest.raises(NotImplementedError, match="pallas_tpu: it needs a TPU, this is cpu"):
        attnorm.dot_product_attention(*arrays, implementation="pallas_tpu")
    got = attnorm.dot_product_attention(*arrays, implementation=("pallas_tpu", "chunked"))
    np.testing.assert_array_equal(got, attnorm.dot_product_attention(*arrays, implementation="chunked"))


@pytest.mark.parametrize("size, axes", [(1, None), (2, "data"), (2, None)])
def test_a_mesh_of_tpus_is_served_from_elsewhere(size, axes):
    """As programs are compiled ahead of time, in training too."""
    device = AbstractDevice(device_kind="TPU v5 lite", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((size,), ("data",), (AxisType.Auto,), abstract_device=device)
    attend = functools.partial(attnorm.dot_product_attention, implementation="pallas_tpu")
    program = jax.make_jaxpr(attnorm.sharded(attend, mesh, axes))(*make_arrays(B=2, T=8, S=8))
    assert "attnorm_forward" in str(program)


def test_float64_is_refused():
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="float64"):
        query = jnp.ones((1, 4, 1, 8), jnp.float64)
        attnorm.dot_product_attention(query, query, query, implementation="pallas_tpu")


def test_forward_mode_is_a_type_error():
    query, key, value = make_arrays(B=1, T=4, S=5)
    attend = functools.partial(attnorm.dot_product_attention, implementation="pallas_tpu")
    with kernels.config(INTERPRET), pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda query: attend(query, key, value), (query,), (query,))


def test_a_mesh_with_auto_axes_is_refused_by_name():
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match="attnorm.sharded"):
        jax.eval_shape(
            lambda *arrays: attnorm.dot_product_attention(*arrays, implementation="pallas_tpu"),
            *make_arrays(),
        )


def test_a_query_replicated_over_explicit_axes_is_refused():
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match="replicated"):
        jax.eval_shape(
            lambda *arrays: attnorm.dot_product_attention(*arrays, implementation="pallas_tpu"),
            *make_arrays(),
        )


def test_a_sequence_of_names_falls_through_and_logs_once(caplog):
    attention._log_once.cache_clear()
    arrays = make_arrays()
    with caplog.at_level(logging.DEBUG, "attnorm.attention"):
        for _ in range(2):
            got = attnorm.dot_product_attention(*arrays, implementation=("pallas_tpu", "chunked"), **DROPOUT)
    expected = attnorm.dot_product_attention(*arrays, implementation="chunked", **DROPOUT)
    np.testing.assert_array_equal(got, expected)
    (record,) = caplog.records
    assert record.levelno == logging.DEBUG
    assert "chunked" in record.getMessage() and "pallas_tpu: dropout" in record.getMessage()


def test_a_refusal_prints_no_numbers_of_an_array(caplog):
    """It would have to wait for them, also where another implementation serves, and remember all that it ever met."""
    rule = attnorm.get_normalizer("ssmax", h=np.float32([0.125, 0.25, 0.375, 0.5]))
    arrays = make_arrays(B=1, T=8, S=8)
    attend = functools.partial(attnorm.dot_product_attention, *arrays, normalizer=rule)
    wanted = r"normalizer SSMax\(h=.*float32\[4\].*, c=0.0\) needs count, map"
    attention._log_once.cache_clear()
    with caplog.at_level(logging.DEBUG, "attnorm.attention"):
        attend(implementation=("pallas_tpu", "chunked"))
    assert re.search(wanted, caplog.text)
    with pytest.raises(NotImplementedError, match=wanted):
        attend(implementation="pallas_tpu")


def test_a_tpu_prefers_its_kernels(monkeypatch):
    arrays = make_arrays(B=1, T=8, S=8)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with kernels.config(INTERPRET):
        program = str(jax.make_jaxpr(attnorm.dot_product_attention)(*arrays))
        with_dropout = str(jax.make_jaxpr(lambda *x: attnorm.dot_product_attention(*x, **DROPOUT))(*arrays))
    assert "attnorm_forward" in program and "attnorm_forward" not in with_dropout


@pytest.mark.parametrize("size", [0, 100, -128, 128.0])
def test_block_sizes_are_multiples_of_128(size):
    with pytest.raises(ValueError, match="block size key must be a positive multiple of 128"):
        kernels.BlockSizes(128, size)


def test_blocks_shrink_to_the_memory():
    def area(**changed):
        options = dict(head_dims=(128, 128), itemsize=4, dense_bytes=0, rule_tiles=2) | changed
        return [
            blocks.query * blocks.key
            for blocks in (settings.forward_blocks(**options), settings.backward_blocks(**options))
        ]

    def is_less(a, b):
        return all(x < y for x, y in zip(a, b, strict=True))

    with kernels.config(kernels.Config(vmem_bytes=6 * 2**20)):
        small = area()
        assert is_less(area(head_dims=(1024, 1024)), small)
        assert is_less(area(dense_bytes=32), small)
        assert is_less(area(rule_tiles=16), small)
    with kernels.config(kernels.Config(vmem_bytes=2**27)):
        assert is_less(small, area())
    with kernels.config(kernels.Config(vmem_bytes=3 * 2**20, forward=SMALL, backward=SMALL)):
        assert area() == [128 * 128] * 2


@pytest.mark.parametrize("topology", ["v5e", "v6e"])
def test_blocks_by_chip_and_head_dim(topology, monkeypatch):
    version = pltpu.ChipVersion(topology)
    monkeypatch.setattr(pltpu, "get_tpu_info", lambda: pltpu.get_tpu_info_for_chip(version, 1))
    options = dict(itemsize=2, dense_bytes=0, rule_tiles=2)
    narrow, wide = (settings.backward_blocks(head_dims=(128, H), **options).query for H in (128, 256))
    assert (narrow, wide) == (1024, 512 if topology == "v5e" else 1024)
    with kernels.config(kernels.Config(backward=SMALL)):
        assert settings.backward_blocks(head_dims=(128, 128), **options) == SMALL


def test_a_rule_needs_memory_by_the_values_it_keeps():
    one, many = (attnorm.get_normalizer("lp", p=p) for p in (1.0, np.float32([1.5, 3.0])))
    for backward in (False, True):
        assert 0 < tile.rule_tiles(one, backward) < tile.rule_tiles(many, backward)


@pytest.mark.slow
def test_gradients_in_chunks_of_queries_are_those_of_the_whole():
    arrays = make_arrays(B=2, T=500, S=200, N=2, K=1)
    lengths = np.array([450, 130], np.int32)
    ids = np.repeat([[0, 1, 2]], [100, 250, 150], axis=1).repeat(2, 0).astype(np.int32)

    def gradients(config):
        with kernels.config(config):
            return jax.jit(
                jax.grad(
                    lambda p, *arrays: jnp.sum(
                        attnorm.dot_product_attention(
                            *arrays,
                            normalizer=attnorm.get_normalizer("lp", p=p),
                            is_causal=True,
                            query_offset=np.array([-30, 20]),
                            query_seq_lengths=lengths,
                            query_segment_ids=ids,
                            key_value_segment_ids=ids[:, :200],
                            mask=np.random.default_rng(0).random((500, 200)) < 0.9,
                            implementation="pallas_tpu",
                            precision="highest",
                        )
                        ** 2
                    ),
                    argnums=(0, 1, 2, 3),
                )
            )(np.float32([1.5, 3.0]), *arrays)

    whole = gradients(INTERPRET)
    # Two tiles of 128 queries and 2 heads: 2 chunks of 4 tiles.
    chunk = 2 * 2 * 2 * 128 * 128 * 12
    chunked = gradients(kernels.Config(forward=SMALL, backward=SMALL, vmem_bytes=chunk, interpret=True))
    for got, expected in zip(jax.tree.leaves(chunked), jax.tree.leaves(whole), strict=True):
        assert np.abs(expected).max() > 0
        assert_near("gradient", got, expected, 1e-6)
