"""Attention over arrays that are sharded along batch and heads: each device computes its own part."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

Axes = str | tuple[str, ...] | None


def sharded(
    attention: Callable, mesh: Mesh | AbstractMesh, batch_axes: Axes = None, head_axes: Axes = None
) -> Callable:
    """The attention function, run by ``jax.shard_map`` on each device's own batch entries and heads.

    For meshes with Auto axes, where a kernel cannot see how its inputs are sharded. Arrays that are sharded over
    Explicit axes need no wrapper. Nothing is communicated, but for the gradients of replicated arguments.

    Args:
      attention: :func:`attnorm.dot_product_attention`, a function with some of its arguments, by the same names, or a
        partial of either.
      mesh: the mesh; its other axes replicate the computation.
      batch_axes: mesh axes that split B; their total size divides it.
      head_axes: mesh axes that split N and K; their total size divides both, or K is 1.

    Returns:
      A function with the arguments of ``attention``. With dropout, each device drops by a key of its own.

    Raises:
      ValueError: an axis that the mesh lacks, or, when called, a dimension that the axes do not divide.

    >>> import jax, jax.numpy as jnp
    >>> import attnorm
    >>> mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    >>> attention = attnorm.sharded(attnorm.dot_product_attention, mesh, "data", "tensor")
    >>> query, key, value = jnp.ones((3, 2, 8, 4, 16))
    >>> attention(query, key, value, is_causal=True).shape
    (2, 8, 4, 16)
    """
    batch_axes, head_axes = as_tuple(batch_axes), as_tuple(head_axes)
    for axis in batch_axes + head_axes:
        if axis not in mesh.axis_names:
            raise ValueError(f"mesh has axes {mesh.axis_names}, got {axis!r}")
    if set(batch_axes) & set(head_axes):
        raise ValueError(f"an axis can split batch or heads, not both, got {batch_axes} and {head_axes}")
    bound: dict[str, Any] = {}
    while isinstance(attention, functools.partial):  # what it binds has to be split as well
        if attention.args:
            raise TypeError("attention must be a partial of keyword arguments only")
        bound = attention.keywords | bound
        attention = attention.func
    takes_implementation = "implementation" in inspect.signature(attention).parameters

    def wrapped(query, key, value, bias=None, mask=None, **options):
        named = {**bound, **options, "query": query, "key": key, "value": value}
        named |= {name: x for name, x in (("bias", bias), ("mask", mask)) if x is not None}
        # For its checks, which speak of the whole arrays; on which device these will be is not known here.
        on_any_device = {"implementation": "reference"} if takes_implementation else {}
        jax.eval_shape(lambda: attention(**{**named, **on_any_device}))
        return _call(attention, named, mesh, batch_axes, head_axes, set(mesh.axis_names))

    return wrapped


def explicit_axes(
    query: jax.Array,
) -> tuple[AbstractMesh, tuple[str, ...], tuple[str, ...]] | None:
    """The mesh, and the Explicit axes over which the query's batch and heads are sharded; None if there are none."""
    sharding = jax.typeof(query).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    spec = (None,) * (4 - query.ndim) + tuple(sharding.spec) + (None,) * (query.ndim - len(sharding.spec))
    batch, length, heads, head_dim = spec
    for name, axes in (("length T", length), ("head dim H", head_dim)):
        if axes is not None:
            raise ValueError(f"query must be sharded along batch and heads only, got {name} over {axes!r}")
    if batch is None and heads is None:
        return None
    return sharding.mesh, as_tuple(batch), as_tuple(heads)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """Of a mesh's devices, for which programs can be compiled elsewhere; of this process where it names none."""
    return mesh.devices.flat[0].platform if isinstance(mesh, Mesh) else jax.default_backend()


def explicit_sharding(mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> NamedSharding:
    """The sharding by those axes of a spec that are Explicit; over the others the compiler splits as it likes."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    axes = ([axis for axis in as_tuple(entry) if kinds[axis] == AxisType.Explicit] for entry in spec)
    return NamedSharding(mesh, PartitionSpec(*(tuple(own) or None for own in axes)))


def is_partitioned_automatically(query: jax.Array) -> bool:
    """Whether the compiler may split the query over devices as it likes, as far as can be seen from here."""
    if isinstance(query, jax.Array) and not isinstance(query, jax.core.Tracer):
        return len(query.sharding.device_set) > 1
    mesh = jax.sharding.get_abstract_mesh()
    return any(
        kind == AxisType.Auto and mesh.shape[axis] > 1
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )


def is_replicated_over_explicit_axes(query: jax.Array) -> bool:
    """Whether a query that no Explicit axis splits stands on several devices of a mesh with such axes."""
    mesh = jax.typeof(query).sharding.mesh
    if mesh.empty:
        mesh = jax.sharding.get_abstract_mesh()
    return any(
        kind == AxisType.Explicit and mesh.shape[axis] > 1
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    )


def over_explicit_axes(
    attention: Callable, named: dict[str, Any], mesh, batch_axes, head_axes, returns_weights: bool = False
):
    """Calls the attention on each device's own part; arrays are first brought to one layout.

    ``returns_weights`` where the result is (B, N, T, S) and not (B, T, N, Hv).
    """
    context = jax.sharding.get_abstract_mesh()  # without the axes over which vmap has spread the call
    explicit = {
        axis
        for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if kind == AxisType.Explicit and (context.empty or axis in context.axis_names)
    }
    specs = _specs(named, batch_axes, head_axes)

    def move(x, spec):
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))

    moved = {name: jax.tree.map(move, x, specs[name]) for name, x in _arrays(named, specs).items()}
    return _call(attention, {**named, **moved}, mesh, batch_axes, head_axes, explicit, returns_weights)


def _arrays(named, specs):
    """The arguments that are split. A list is one array here, not a tree."""
    return {
        name: x if name == "normalizer" or isinstance(x, jax.Array) else jnp.asarray(x)
        for name, x in ((name, named[name]) for name in specs)
    }


def _call(attention, named, mesh, batch_axes, head_axes, manual, returns_weights=False):
    query, key = jnp.asarray(named["query"]), jnp.asarray(named["key"])
    if query.ndim in (3, 4) and key.ndim == query.ndim:
        check_division("query batch size B", query.shape[0] if query.ndim == 4 else 1, batch_axes, mesh)
        check_division("query heads N", query.shape[-2], head_axes, mesh)
        if key.shape[-2] != 1:
            check_division("key heads K", key.shape[-2], head_axes, mesh)
    specs = _specs(named, batch_axes, head_axes)
    arrays = _arrays(named, specs)
    constants = {name: value for name, value in named.items() if name not in specs}

    def local(arrays):
        if arrays.get("dropout_rng") is not None and batch_axes + head_axes:
            part = jax.lax.axis_index(batch_axes + head_axes)
            arrays = {**arrays, "dropout_rng": jax.random.fold_in(arrays["dropout_rng"], part)}
        return attention(**arrays, **constants)

    rows = _aligned(query.ndim - 1, (batch_axes, (), head_axes))
    out: PartitionSpec | tuple[PartitionSpec, PartitionSpec] = PartitionSpec(*rows, None)
    if returns_weights:
        out = PartitionSpec(*_aligned(query.ndim, (batch_axes, head_axes, (), ())))
    elif named.get("return_log_norm"):
        out = PartitionSpec(*rows, None), PartitionSpec(*rows)
    return jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=out, axis_names=manual)(arrays)


def _specs(named, batch_axes, head_axes):
    """How each array argument is split, by name; other arguments are left out."""
    full = dict(
        query=(batch_axes, (), head_axes, ()),
        key=(batch_axes, (), head_axes, ()),
        value=(batch_axes, (), head_axes, ()),
        bias=(batch_axes, head_axes, (), ()),
        mask=(batch_axes, head_axes, (), ()),
        query_offset=(batch_axes,),
        query_seq_lengths=(batch_axes,),
        key_value_seq_lengths=(batch_axes,),
        query_segment_ids=(batch_axes, ()),
        key_value_segment_ids=(batch_axes, ()),
        dropout_rng=(),
    )
    specs = {}
    for name, axes in full.items():
        if named.get(name) is None or isinstance(named[name], int):
            continue
        shape = jnp.shape(named[name])
        aligned = _aligned(len(shape), axes)
        # A dimension of size 1 is broadcast, or, as a single key head, shared.
        specs[name] = PartitionSpec(
            *(None if size == 1 else axis for size, axis in zip(shape, aligned, strict=True))
        )
    normalizer = named.get("normalizer")
    if jax.tree.leaves(normalizer) and not isinstance(normalizer, str):
        specs["normalizer"] = jax.tree.map(
            lambda leaf: PartitionSpec(head_axes or None) if jnp.ndim(leaf) else PartitionSpec(), normalizer
        )
    return specs


def _aligned(rank, axes):
    """The last ``rank`` entries, as PartitionSpec wants them; absent leading ones are unsplit."""
    axes = tuple(axis or None for axis in axes)
    return ((None,) * rank + axes)[-rank:] if rank else ()


def check_division(name, size, axes, mesh):
    parts = math.prod(mesh.shape[axis] for axis in axes)
    if size % parts:
        raise ValueError(f"{name} must be a multiple of {parts}, the size of mesh axes {axes}, got {size}")


def as_tuple(axes: Axes) -> tuple[str, ...]:
    if axes is None:
        return ()
    return (axes,) if isinstance(axes, str) else tuple(axes)
