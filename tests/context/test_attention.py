"""Attention over a split sequence: the same values and gradients as on one device, and what is refused."""

import functools
import itertools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh

import attnorm
from attnorm.context import attention as context_attention
from attnorm.context import unzigzag, zigzag
from tests.context.grid import CASES, MASKS

# One compilation each; among them are both variants and orders, and every axis of the mesh.
FAST = ["causal:2x2x2", "window:1x8x1", "gathered:1x4x2"]
SHAPES = ("1x2x1", "1x8x1", "1x4x2", "1x8x1")
SLOW = [f"{name}:{shape}" for name, shape in zip(CASES, itertools.cycle(SHAPES), strict=False)]
SLOW += [f"{name}:1x{count}x1" for name in MASKS for count in (1, 2, 4, 8)]
SLOW += [f"{name}:1x2x2" for name in CASES if name.endswith("one-key-head")]
SLOW = list(dict.fromkeys(SLOW))


def test_some_cases_match_the_oracle(on_devices):
    assert on_devices(8, "-m", "tests.context.grid", *FAST).count("ok") == len(FAST)


@pytest.mark.slow
def test_every_case_matches_the_oracle(on_devices):
    assert on_devices(8, "-m", "tests.context.grid", *SLOW).count("ok") == len(SLOW)


MESH = AbstractMesh((2, 8), ("data", "context"), axis_types=(AxisType.Auto,) * 2)
ROW = np.zeros((2, 32, 2, 4), np.float32)


@pytest.mark.parametrize(
    "error, options, fragments",
    [
        (TypeError, {"mesh": 8}, ["mesh", "Mesh", "8"]),
        (ValueError, {"context_axis": "ring"}, ["context_axis", "'data', 'context'", "'ring'"]),
        (ValueError, {"batch_axes": "fsdp"}, ["batch_axes", "'data', 'context'", "'fsdp'"]),
        (ValueError, {"head_axes": "context"}, ["head_axes", "different", "'context'"]),
        (ValueError, {"variant": "tree"}, ["variant", "ring", "all_gather", "'tree'"]),
        (ValueError, {"order": "random"}, ["order", "ordinary", "zigzag", "'random'"]),
        (ValueError, {"query": ROW[:, :7]}, ["query", "8 devices", "'context'", "T = 7"]),
        (
            ValueError,
            {"query": ROW[:, :24], "order": "zigzag"},
            ["query length T", "multiple of 2 n = 16", "24"],
        ),
        (ValueError, {"key": ROW[:, :0], "value": ROW[:, :0]}, ["value", "size 0", "(2, 0, 2, 4)"]),
        (
            ValueError,
            {"batch_axes": "data", **dict.fromkeys(("query", "key", "value"), ROW[:1])},
            ["B", "2", "1"],
        ),
        (ValueError, {"normalizer": "sigmoid", "return_log_norm": True}, ["return_log_norm", "Sigmoid"]),
        (NotImplementedError, {"normalizer": "entmax15"}, ["ring", "level", "all_gather"]),
        (ValueError, {"implementation": ("chunked", "xla")}, ["implementation", "pallas_tpu", "'xla'"]),
        (NotImplementedError, {"implementation": "reference"}, ["ring", "chunked", "'reference'"]),
        (NotImplementedError, {"implementation": "pallas_tpu", "normalizer": "alibi"}, ["pallas_tpu", "map"]),
    ],
)
def test_what_is_refused_is_named(error, options, fragments):
    options = {"query": ROW, "key": ROW, "value": ROW, "mesh": MESH} | options
    with pytest.raises(error) as raised:
        jax.eval_shape(lambda: attnorm.ring_attention(**options))
    assert all(fragment in str(raised.value) for fragment in fragments), raised.value


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


@pytest.mark.parametrize("kinds", [(EXPLICIT, EXPLICIT), (EXPLICIT, AUTO), (AUTO, EXPLICIT)], ids=str)
@pytest.mark.parametrize("T", [10, 16])
def test_meshes_with_explicit_axes(kinds, T):
    """10 rows are whole along the 4 devices' axis, 16 are split as far as its type tells."""
    mesh = AbstractMesh((4, 2), ("context", "tensor"), axis_types=kinds)
    x = jax.ShapeDtypeStruct((1, T, 2, 4), jnp.float32)

    def attend(query, key, value):
        out = attnorm.ring_attention(query, key, value, mesh=mesh, head_axes="tensor", is_causal=True)
        wanted = (
            "context" if T == 16 and kinds[0] == EXPLICIT else None,
            "tensor" if kinds[1] == EXPLICIT else None,
        )
        assert jax.typeof(out).sharding.spec[1:3] == wanted
        return jnp.sum(out)

    with jax.sharding.use_abstract_mesh(mesh):
        gradients = jax.eval_shape(jax.grad(attend, argnums=(0, 1, 2)), x, x, x)
    assert [dx.shape for dx in gradients] == [x.shape] * 3


@pytest.mark.parametrize("kinds", [(EXPLICIT,) * 3, (EXPLICIT, AUTO, AUTO)], ids=str)
def test_members_that_are_split_over_an_explicit_axis(kinds):
    mesh = AbstractMesh((2, 2, 2), ("members", "context", "tensor"), axis_types=kinds)
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("members"))
    x = jax.ShapeDtypeStruct((2, 1, 10, 2, 4), jnp.float32, sharding=split)

    def attend(query, key, value):
        return attnorm.ring_attention(query, key, value, mesh=mesh, head_axes="tensor", is_causal=True)

    def members(*arrays):
        out = jax.vmap(attend)(*arrays)
        assert jax.typeof(out).sharding.spec[0] == "members"
        return out

    with jax.sharding.use_abstract_mesh(mesh):
        assert jax.eval_shape(members, x, x, x).shape == x.shape


class OtherDevice:
    """Of a platform that programs can be compiled for, and that is not this one."""

    platform, device_kind, process_index = "tpu", "TPU v5", 0

    def __init__(self, number):
        self.id = number


@pytest.mark.parametrize("variant", ["ring", "all_gather"])
def test_implementations_are_those_of_the_platform_of_the_mesh(variant, monkeypatch):
    tried = []

    def refuse(query, *_):
        tried.append(query.shape)
        return "it is not wanted here"

    monkeypatch.setattr(context_attention.tpu, "supports", refuse)
    here = Mesh(np.array(jax.devices()[:1]), "context", axis_types=(AUTO,))
    there = Mesh(np.array([OtherDevice(0), OtherDevice(1)]), "context", axis_types=(AUTO,))
    for mesh, is_tried in ((here, False), (there, True)):
        tried.clear()
        jax.eval_shape(lambda: attnorm.ring_attention(*[ROW] * 3, mesh=mesh, variant=variant))  # noqa: B023
        assert bool(tried) == is_tried


def test_rows_that_see_one_key_have_gradients_rounded_as_without_a_ring():
    """Their weight is 1 whatever the logit: what is left of large terms is the rounding of both."""
    arrays = np.random.default_rng(0).normal(size=(4, 1, 32, 2, 16)).astype(np.float32)
    mesh = jax.make_mesh((1,), ("context",), axis_types=(AUTO,))

    @jax.jit
    def gradients(query, key, value, d_output):
        results = []
        for attend in (attnorm.dot_product_attention, functools.partial(attnorm.ring_attention, mesh=mesh)):
            attend = functools.partial(attend, normalizer="softmax", local_window_size=0)
            results.append(jax.vjp(attend, query, key, value)[1](d_output))
        return results

    alone, ring = gradients(*arrays)
    jax.tree.map(np.testing.assert_array_equal, ring, alone)


def test_padding_is_told_once(caplog):
    context_attention._log_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            jax.eval_shape(lambda: attnorm.ring_attention(*[ROW[:, :31]] * 3, mesh=MESH))
    assert [record.getMessage() for record in caplog.records] == [
        f"{name}: length 31 is padded to 32, a multiple of 8 blocks of devices" for name in ("query", "key")
    ]


@pytest.mark.parametrize("num_devices", [1, 3, 4])
def test_each_device_has_the_same_causal_work_in_zigzag_order(num_devices):
    """The pairs under the causal mask, of the positions that a device holds."""
    positions = zigzag(jnp.arange(8 * num_devices), num_devices, axis=0).reshape(num_devices, -1)
    assert np.unique(np.sum(np.asarray(positions) + 1, axis=1)).size == 1
    x = np.arange(3 * 8 * num_devices * 2).reshape(3, -1, 2)
    np.testing.assert_array_equal(unzigzag(zigzag(x, num_devices), num_devices), x)


def test_a_length_without_a_zigzag_order_is_refused():
    with pytest.raises(ValueError, match="2 \\* num_devices = 8 divides, got 12 along axis 1"):
        zigzag(np.zeros((1, 12)), 4)
