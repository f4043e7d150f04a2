"""Where parameters live: rules from their names to mesh axes, which optimiser moments and averages follow."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Axes = tuple[str | tuple[str, ...] | None, ...]

# (what the name ends in, axes of its last dimensions). A linear map that opens a layer has its outputs over `tensor`,
# the one that closes it its inputs, so that activations between them are split and one sum at the end joins them
# (arXiv 1909.08053). `fsdp` splits the inputs of all: on a TPU, sums of gradients are scattered along the first
# dimension, and would otherwise be on every device before they are cut. Names without a rule are on every device.
RULES = (
    (r"/(query|key|value|gate|enter|project_in)/kernel", ("fsdp", "tensor")),
    (r"/(query|key|value|gate|enter|project_in)/bias", ("tensor",)),
    (r"/(project|leave|project_out)/kernel", (("tensor", "fsdp"), None)),
    (r"/(embedding|table|head)", ("tensor", "fsdp")),
)


def shardings(tree: Any, mesh: Mesh, rules: Sequence[tuple[str, Axes]] = RULES) -> Any:
    """The sharding of each leaf of a tree of arrays or shapes, by its path.

    A leading dimension more, of members of an ensemble or of stacked layers, is not split; nor is a dimension that
    the devices of its axes do not divide.

    >>> import jax
    >>> from attnorm.training.config import MeshConfig
    >>> from attnorm.training.mesh import make_mesh
    >>> from attnorm.training.placement import shardings
    >>> mesh = make_mesh(MeshConfig(data=-1, fsdp=1, context=1, tensor=1))
    >>> params = {"mlp": {"leave": {"kernel": jax.ShapeDtypeStruct((12, 64, 16), float)}}}
    >>> tuple(shardings(params, mesh)["mlp"]["leave"]["kernel"].spec)
    (None, ('tensor', 'fsdp'), None)
    """

    def place(path, leaf):
        name = "/" + jax.tree_util.keystr(path, simple=True, separator="/")
        axes = next((axes for pattern, axes in rules if re.search(f"{pattern}$", name)), ())
        if len(axes) > leaf.ndim:
            axes = ()
        axes = (None,) * (leaf.ndim - len(axes)) + axes
        whole = (
            axis if size % _devices(axis, mesh) == 0 else None
            for axis, size in zip(axes, leaf.shape, strict=True)
        )
        return NamedSharding(mesh, PartitionSpec(*whole))

    return jax.tree_util.tree_map_with_path(place, tree)


def _devices(axes: str | tuple[str, ...] | None, mesh: Mesh) -> int:
    names = (axes,) if isinstance(axes, str) else axes or ()
    return math.prod(mesh.shape[name] for name in names)
