"""Where parameters live: rules from their names to mesh axes, which optimiser moments and averages follow."""

import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# (what the name ends in, axes of its last dimensions). A linear map that opens a layer has its outputs over `tensor`,
# the one that closes it its inputs, so that activations between them are split and one sum at the end joins them
# (arXiv 1909.08053); the other dimension is over `fsdp`. Names without a rule are on every device.
RULES = (
    (r"/(query|key|value|gate|enter|project_in)/kernel", ("fsdp", "tensor")),
    (r"/(query|key|value|gate|enter|project_in)/bias", ("tensor",)),
    (r"/(project|leave|project_out)/kernel", ("tensor", "fsdp")),
    (r"/(embedding|table|head)", ("tensor", "fsdp")),
)


def shardings(tree: Any, mesh: Mesh, rules: Sequence[tuple[str, tuple[str, ...]]] = RULES) -> Any:
    """The sharding of each leaf of a tree of arrays or shapes, by its path.

    A leading dimension more, of members of an ensemble or of stacked layers, is not split; nor is a dimension that
    the size of its axis does not divide.

    >>> import jax
    >>> from attnorm.training.config import MeshConfig
    >>> from attnorm.training.mesh import make_mesh
    >>> from attnorm.training.placement import shardings
    >>> mesh = make_mesh(MeshConfig(data=-1, fsdp=1, context=1, tensor=1))
    >>> params = {"mlp": {"leave": {"kernel": jax.ShapeDtypeStruct((12, 64, 16), float)}}}
    >>> tuple(shardings(params, mesh)["mlp"]["leave"]["kernel"].spec)
    (None, 'tensor', 'fsdp')
    """

    def place(path, leaf):
        name = "/" + jax.tree_util.keystr(path, simple=True, separator="/")
        axes = next((axes for pattern, axes in rules if re.search(f"{pattern}$", name)), ())
        if len(axes) > leaf.ndim:
            axes = ()
        axes = (None,) * (leaf.ndim - len(axes)) + axes
        whole = (
            None if axis and size % mesh.shape[axis] else axis
            for axis, size in zip(axes, leaf.shape, strict=True)
        )
        return NamedSharding(mesh, PartitionSpec(*whole))

    return jax.tree_util.tree_map_with_path(place, tree)
