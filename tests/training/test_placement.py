"""Where parameters, moments and averages are placed, and which rows a batch's axes split."""

import jax
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from attnorm.training.loop import parse_config
from attnorm.training.mesh import AXES, batch_axes
from attnorm.training.placement import shardings
from attnorm.training.setup import Setup

MESH = AbstractMesh((2, 2, 1, 4), AXES)


@pytest.mark.parametrize(
    ("name", "shape", "spec"),
    [
        ("blocks/attention/query/kernel", (12, 64, 64), (None, "fsdp", "tensor")),
        ("blocks/attention/project/kernel", (12, 64, 64), (None, ("tensor", "fsdp"), None)),
        ("blocks/mlp/enter/bias", (12, 64), (None, "tensor")),
        ("blocks/mlp/leave/bias", (12, 64), (None, None)),
        ("token_embedding/embedding", (64, 32), ("tensor", "fsdp")),
        ("head", (64, 32), ("tensor", "fsdp")),
        ("head/kernel", (64, 1), (None, None)),
        # What an axis does not divide is whole.
        ("token_embedding/embedding", (257, 32), (None, "fsdp")),
        ("key/kernel", (64, 6), ("fsdp", None)),
        ("count", (), ()),
    ],
)
def test_rules(name, shape, spec):
    tree = jax.ShapeDtypeStruct(shape, float)
    for part in reversed(name.split("/")):
        tree = {part: tree}
    (found,) = jax.tree.leaves(shardings(tree, MESH))
    assert found.spec == PartitionSpec(*spec)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_and_averages_are_placed_as_their_parameters(tiny, name):
    tiny["optimizer"]["name"] = name
    tiny["ema_decay"] = 0.9
    tiny["ensemble"].update(normalizers=("l2",), seeds=(0,))
    state = Setup(*parse_config(tiny)).abstract_state()
    placed = shardings(state, MESH)
    by_kernel = jax.tree.leaves(
        [
            x.spec
            for path, x in jax.tree_util.tree_flatten_with_path(placed)[0]
            if "project_in" in jax.tree_util.keystr(path) and "kernel" in jax.tree_util.keystr(path)
        ],
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    # The parameter, its average, and one moment of Muon's or two of Adam's.
    assert by_kernel == [PartitionSpec(None, "fsdp", "tensor")] * {"muon": 3, "adamw": 4}[name]


def test_rows_that_the_axes_do_not_divide_are_on_every_device():
    assert batch_axes(8, MESH) == ("data", "fsdp")
    assert batch_axes(6, MESH) == ()
