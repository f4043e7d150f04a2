"""Where activations are split over devices, for a model that is trained on a mesh of such axes."""

import jax
from jax.sharding import AxisType, PartitionSpec
from jaxtyping import Array, Float

# The axes that split rows, length, and the features inside a layer; those of attnorm.training.mesh.
_ROWS, _LENGTH, _FEATURES = ("data", "fsdp"), "context", "tensor"


def split_over_mesh(x: Float[Array, "B T D"], *, inside_layer: bool = False) -> Float[Array, "B T D"]:
    """The activations, split as the mesh in context asks for; elsewhere, as in an ordinary call, unchanged.

    The compiler would otherwise split them as the parameters are split, over the same axes, and move activations
    between devices where it should move parameters, which are smaller. A dimension that its axes do not divide is
    left to the compiler.

    Args:
      inside_layer: features are those between the two linear maps of a layer.

    >>> import jax.numpy as jnp
    >>> from attnorm.models.activations import split_over_mesh
    >>> split_over_mesh(jnp.ones((2, 8, 4))).shape
    (2, 8, 4)
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = (_ROWS, (_LENGTH,), (_FEATURES,) if inside_layer else ())
    if not {axis for group in axes for axis in group} <= _automatic_axes(mesh):
        return x
    spec = []
    for size, group in zip(x.shape, axes, strict=True):
        devices = 1
        for axis in group:
            devices *= mesh.shape[axis]
        spec.append((group or None) if size % devices == 0 else PartitionSpec.UNCONSTRAINED)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))


def _automatic_axes(mesh) -> set[str]:
    return {
        axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto
    }
