"""Activations are split where a mesh of the training axes is in context, and nowhere else."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from attnorm.models.activations import split_over_mesh
from attnorm.training.mesh import AXES

FREE = PartitionSpec.UNCONSTRAINED


def specs(mesh, shape, **options):
    """Of the sharding constraints in the program."""
    with jax.sharding.use_abstract_mesh(mesh):
        program = jax.make_jaxpr(lambda x: split_over_mesh(x, **options))(
            jax.ShapeDtypeStruct(shape, "float32")
        )
    return [equation.params["sharding"].spec for equation in program.eqns]


@pytest.mark.parametrize(
    ("shape", "options", "spec"),
    [
        ((8, 6, 5), {}, (("data", "fsdp"), "context", None)),
        ((8, 6, 8), {"inside_layer": True}, (("data", "fsdp"), "context", "tensor")),
        # What its axes do not divide is left to the compiler.
        ((6, 5, 6), {"inside_layer": True}, (FREE, FREE, FREE)),
    ],
)
def test_rows_length_and_features_have_their_axes(shape, options, spec):
    mesh = AbstractMesh((2, 2, 2, 4), AXES, axis_types=(AxisType.Auto,) * 4)
    assert specs(mesh, shape, **options) == [PartitionSpec(*spec)]


def test_another_mesh_changes_nothing():
    assert specs(AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2), (4, 4, 4)) == []
    assert specs(AbstractMesh((2,) * 4, AXES, axis_types=(AxisType.Explicit,) * 4), (4, 4, 4)) == []
