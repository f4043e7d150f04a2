"""What differs between the supported releases of JAX (0.10.2 to 0.12), in one place."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import jax

# Pallas kernels for Hopper: plgpu.kernel(out_type=...), plgpu.store and an interpreter. From 0.12 on.
HAS_MOSAIC_GPU = jax.__version_info__ >= (0, 12)
# Deprecated since 0.11; gone in a release to come.
HAS_PALLAS_TRITON = find_spec("jax.experimental.pallas.triton") is not None


def is_gce_tpu() -> bool:
    """Whether a metadata server calls this a TPU VM of Compute Engine. Where JAX sees no chip, none is asked."""
    from jax._src.clusters.cloud_tpu_cluster import GceTpuCluster

    try:
        return GceTpuCluster.is_env_present()
    except OSError:  # there is no such server elsewhere
        return False


def varying_axes(tree: Any) -> frozenset[str]:
    """The mesh axes over which some array of the tree varies inside ``jax.shard_map``; else empty."""
    return frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in jax.tree.leaves(tree)))


def vary(tree: Any, axes: frozenset[str]) -> Any:
    """The tree with every array varying over at least these axes."""

    def cast(x):
        missing = tuple(sorted(axes - varying_axes(x)))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def vary_alike(tree: Any) -> Any:
    """The tree with every array varying over the axes of all; the transpose sums the cotangents back."""
    return vary(tree, varying_axes(tree))


def vary_like(tree: Any, other: Any) -> Any:
    """The tree with every array varying at least over the axes of ``other``."""
    return vary(tree, varying_axes(other))


def shape_dtype_struct(shape: tuple[int, ...], dtype: Any, axes: frozenset[str]) -> jax.ShapeDtypeStruct:
    """The shape of a kernel's output that varies over these mesh axes."""
    # Also where there are none: inside shard_map that must be said.
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.sharding.ManualAxisType(varying=axes))
