"""The public function: what it accepts, the order in which devices hold the sequence, and what they run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from attnorm import chunked
from attnorm.arguments import checked_call
from attnorm.attention import dot_product_attention, implementations_for, not_served
from attnorm.context import gather, ring
from attnorm.context.limits import Limits
from attnorm.context.order import Order
from attnorm.kernels import tpu
from attnorm.normalizers import Normalizer
from attnorm.normalizers.rule import checked_floating
from attnorm.sharding import Axes, as_tuple, check_division, explicit_sharding, platform_of
from attnorm.tiling import round_up

_log = logging.getLogger(__name__)
# What a ring computes with: implementations that give partial results, and their gradients.
_TILES = {"chunked": chunked, "pallas_tpu": tpu}
_WITHOUT_PARTS = ("reference", "pallas_gpu")
_VARIANTS = ("ring", "all_gather")
_ORDERS = ("ordinary", "zigzag")


def ring_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    *,
    mesh: Mesh | AbstractMesh,
    context_axis: str = "context",
    batch_axes: Axes = (),
    head_axes: Axes = (),
    variant: str = "ring",
    order: str = "ordinary",
    normalizer: str | Normalizer = "l2",
    scale: float | None = None,
    is_causal: bool = False,
    query_offset: int | Int[Array, ""] | Int[Array, "B"] = 0,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    query_seq_lengths: Int[Array, "B"] | None = None,
    key_value_seq_lengths: Int[Array, "B"] | None = None,
    query_segment_ids: Int[Array, "*B T"] | None = None,
    key_value_segment_ids: Int[Array, "*B S"] | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_log_norm: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    r"""Exact attention over a sequence split over n devices, each of which holds T / n queries and S / n keys.

    The keys of part c give the row state :math:`(m_c, l_c, o_c)`, and states merge exactly for every one-pass
    normaliser; of an L_p norm,

    .. math::
      m = \max_c m_c, \qquad l = \sum_c e^{p (m_c - m)} l_c, \qquad o = \sum_c e^{m_c - m} o_c, \qquad
      \mathrm{out} = o \, l^{-1/p}

    so keys and values go round a ring of devices while queries stay. Memory is O(T / n) per device, forward
    and backward, and every transfer is independent of the computation beside it. Works inside ``jax.jit``,
    ``jax.grad`` and ``jax.vmap``.

    Arguments that :func:`attnorm.dot_product_attention` has too mean the same here, and speak of the whole
    sequence. Of those, bias, mask and dropout are missing.

    Args:
      query, key, value: whole arrays, (B, T, N, H), (B, S, K, H) and (B, S, K, Hv), or without B; T and S are
        split over ``context_axis``. A length that the devices' blocks do not divide is padded, and the
        padding hidden; a warning is logged once.
      mesh: the mesh, of any kind of axes; axes that are not named here replicate the computation.
      context_axis: the mesh axis of n devices that splits T and S.
      batch_axes: mesh axes that split B; their total size divides it.
      head_axes: mesh axes that split N and K; their total size divides both, or K is 1.
      variant: ``"ring"``, or ``"all_gather"``: every device gathers all keys and values. For few devices:
        O(S) memory, and transfers before the computation. It serves every normaliser, the ring those whose
        states merge.
      order: ``"ordinary"``: as everywhere. Where only a causal mask or one side of a window hides keys, T = S
        and no offset is given, blocks are exchanged so that all devices have the same work, and the output is
        exchanged back. ``"zigzag"``: arrays and segment ids are in the order of
        :func:`attnorm.context.zigzag`, and so is the output, which saves the exchanges of every layer; 2n
        divides T and S.
      implementation: of the computation on each device; a name, a sequence of names to try in order, or None
        for the best on the platform of the mesh. A ring takes ``"chunked"`` and ``"pallas_tpu"``.

    Returns:
      The output (B, T, N, Hv), in query's dtype, split over the mesh; with ``return_log_norm`` also λ,
      (B, T, N). Gradients are exact, also those of array parameters, which are summed over the mesh. A T that an
      Explicit ``context_axis`` does not divide is whole on each of its devices.

    Raises:
      ValueError: an argument that is not accepted: an axis that the mesh lacks, a dimension that the axes do
        not divide, more devices along ``context_axis`` than blocks of queries.
      TypeError: a dtype or type that is not accepted.
      NotImplementedError: a normaliser that a ring cannot serve, or no implementation that can; with the
        reason.

    Source: arXiv 2310.01889 (ring attention); the zigzag order is that of arXiv 2407.21783, section 3.3.2.

    >>> import jax, jax.numpy as jnp
    >>> import attnorm
    >>> mesh = jax.make_mesh((1,), ("context",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> attend = jax.jit(lambda *arrays: attnorm.ring_attention(*arrays, mesh=mesh, is_causal=True))
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 1, 32, 2, 8))
    >>> out = attend(query, key, value)
    >>> bool(jnp.allclose(out, attnorm.dot_product_attention(query, key, value, is_causal=True), atol=1e-5))
    True
    """
    batch_axes, head_axes = as_tuple(batch_axes), as_tuple(head_axes)
    _check_names(mesh, context_axis, batch_axes, head_axes, variant, order)
    call = checked_call(
        query,
        key,
        checked_floating("value", value),
        None,
        None,
        normalizer=normalizer,
        scale=scale,
        is_causal=is_causal,
        query_offset=query_offset,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        query_segment_ids=query_segment_ids,
        key_value_segment_ids=key_value_segment_ids,
    )
    if return_log_norm and type(call.normalizer).log_norm is Normalizer.log_norm:
        raise ValueError(f"return_log_norm: normalizer {call.normalizer} has no log-norm")
    if implementation is None:
        implementation = implementations_for(platform_of(mesh))
    names = _checked_implementations(implementation, call.normalizer) if variant == "ring" else None
    _check_sizes(call, mesh, context_axis, batch_axes, head_axes)
    query_order, key_order = _orders(call, context_axis, mesh.shape[context_axis], variant, order)
    moves_queries, moves_keys = (order == "ordinary" and own.is_zigzag for own in (query_order, key_order))
    arrays = _padded(call, query_order, key_order)
    specs = _specs(context_axis, batch_axes or None, head_axes or None, *arrays)
    if AxisType.Explicit in mesh.axis_types:
        arrays = _moved(arrays, mesh, specs)
    options: dict[str, Any] = dict(
        scale=call.scale, logits_soft_cap=call.logits_soft_cap, precision=precision
    )

    def queries(x):
        x = query_order.split(x)
        return query_order.from_ordinary(x) if moves_queries else x

    def keys(x):
        x = key_order.split(x)
        return key_order.from_ordinary(x) if moves_keys else x

    def rows(x):
        return query_order.join(query_order.to_ordinary(x) if moves_queries else x)

    def local(query, key, value, normalizer, limits):
        """The part of one device."""
        query, key, value = queries(query), keys(key), keys(value)
        limits = replace(
            limits,
            query_ids=jax.tree.map(queries, limits.query_ids),
            key_ids=jax.tree.map(keys, limits.key_ids),
        )
        if variant == "all_gather":
            attention = functools.partial(
                dot_product_attention,
                **options,
                return_log_norm=return_log_norm,
                implementation=implementation,
            )
            results = gather.attend(attention, query_order, key_order, query, key, value, normalizer, limits)
            return jax.tree.map(rows, results)
        first, steps = _ring(call.visibility, query_order, query.shape[2])
        tiles = _chosen(names, query, normalizer, precision)
        static = ring.Static(query_order, tiles, first, steps, **options)
        output, log_norm = ring.attend(static, query, key, value, normalizer, limits)
        return (rows(output), rows(log_norm)) if return_log_norm else rows(output)

    of_output = specs[0], PartitionSpec(*specs[0][:3])
    out_specs = of_output if return_log_norm else of_output[0]
    results = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out_specs)(*arrays)
    T = call.query.shape[1]
    if _is_explicit(mesh, context_axis) and T % mesh.shape[context_axis]:
        whole = jax.tree.map(lambda spec: PartitionSpec(spec[0], None, *spec[2:]), out_specs)
        results = _moved(results, mesh, whole)
    results = jax.tree.map(lambda x: x[:, :T], results)
    return results if call.batched else jax.tree.map(lambda x: x[0], results)


def _is_explicit(mesh, axis):
    return mesh.axis_types[mesh.axis_names.index(axis)] == AxisType.Explicit


def _moved(arrays, mesh, specs):
    """The arrays, split over Explicit axes as the specs say."""
    return jax.tree.map(lambda x, spec: jax.sharding.reshard(x, explicit_sharding(mesh, spec)), arrays, specs)


def _check_names(mesh, context_axis, batch_axes, head_axes, variant, order):
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise TypeError(f"mesh must be a jax.sharding.Mesh, got {mesh!r}")
    axes = {"context_axis": (context_axis,), "batch_axes": batch_axes, "head_axes": head_axes}
    for name, given in axes.items():
        for axis in given:
            if axis not in mesh.axis_names:
                raise ValueError(f"{name} must name axes of the mesh, {mesh.axis_names}, got {axis!r}")
    named = [axis for given in axes.values() for axis in given]
    if len(set(named)) < len(named):
        raise ValueError(
            f"context_axis, batch_axes and head_axes must be different axes, got {context_axis!r}, {batch_axes} "
            f"and {head_axes}"
        )
    for name, given, known in (("variant", variant, _VARIANTS), ("order", order, _ORDERS)):
        if given not in known:
            raise ValueError(f"{name} must be one of {list(known)}, got {given!r}")


def _checked_implementations(implementation, normalizer):
    """The names of those that a ring may take."""
    missing = normalizer.needs - chunked.SERVES
    if missing:
        raise NotImplementedError(
            f"variant 'ring': normalizer {normalizer} needs {', '.join(sorted(missing))}, which parts of a row do "
            "not tell; variant='all_gather' serves it"
        )
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    for name in names:
        if name not in (*_TILES, *_WITHOUT_PARTS):
            known = [*_TILES, *_WITHOUT_PARTS]
            raise ValueError(f"implementation must be one of {known}, got {name!r}")
    if not set(names) & set(_TILES):
        raise NotImplementedError(
            f"variant 'ring': implementation must be one of {list(_TILES)}, those that give partial results, got "
            f"{implementation!r}"
        )
    return names


def _chosen(names, query, normalizer, precision):
    """The first of these implementations that can serve this device's part."""
    reasons = []
    for name in names:
        if name not in _TILES:
            reasons.append(f"{name}: gives no partial results")
            continue
        tiles = _TILES[name]
        reason = not_served(normalizer, tiles)
        if reason is None and hasattr(tiles, "supports"):
            reason = tiles.supports(query[0], normalizer, None, precision)
        if reason is None:
            return tiles
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(f"variant 'ring': no implementation can serve this call: {'; '.join(reasons)}")


def _check_sizes(call, mesh, context_axis, batch_axes, head_axes):
    B, T, N, _ = call.query.shape
    K, n = call.key.shape[2], mesh.shape[context_axis]
    for name, x in (("query", call.query), ("value", call.value)):
        if 0 in x.shape:
            raise ValueError(f"{name} must have no dimension of size 0, got shape {x.shape}")
    check_division("query batch size B", B, batch_axes, mesh)
    check_division("query heads N", N, head_axes, mesh)
    if K != 1:
        check_division("key heads K", K, head_axes, mesh)
    if T < n:
        raise ValueError(
            f"query must have at least one row for each of the {n} devices along mesh axis {context_axis!r}, got T = {T}"
        )


def _orders(call, context_axis, n, variant, order):
    """The orders in which devices hold queries and keys."""
    T, S = call.query.shape[1], call.key.shape[1]
    if order == "zigzag":
        for name, length in (("query length T", T), ("key length S", S)):
            if length % (2 * n):
                raise ValueError(f"order 'zigzag': {name} must be a multiple of 2 n = {2 * n}, got {length}")
    visibility = call.visibility
    is_one_sided = (visibility.left is None) != (visibility.right is None)
    is_uneven = is_one_sided and T == S and visibility.offset is None and 2 * n <= T and n > 1
    queries = Order(context_axis, n, is_zigzag=order == "zigzag" or is_uneven)
    # A device that gathers all keys does not mind who held them.
    keys = replace(queries, is_zigzag=order == "zigzag") if variant == "all_gather" else queries
    return queries, keys


def _padded(call, query_order, key_order):
    """The arrays to be split over the mesh, with whole blocks, and what they are limited to."""
    visibility = call.visibility

    def pad(name, order, lengths, *arrays):
        length = arrays[0].shape[1]
        blocks = order.num_devices * order.num_blocks
        padded = round_up(length, blocks)
        if padded > length:
            _log_once(name, length, padded, blocks)
            if lengths is None:
                lengths = jnp.full(1, length, jnp.int32)
            widths = [(0, 0), (0, padded - length)]
            arrays = jax.tree.map(lambda x: jnp.pad(x, widths + [(0, 0)] * (x.ndim - 2)), arrays)
        return lengths, *arrays

    query_lengths, query, query_ids = pad(
        "query", query_order, visibility.query_lengths, call.query, visibility.query_segment_ids
    )
    key_lengths, key, value, key_ids = pad(
        "key", key_order, visibility.key_lengths, call.key, call.value, visibility.key_segment_ids
    )
    limits = Limits(
        visibility.left, visibility.right, visibility.offset, query_lengths, key_lengths, query_ids, key_ids
    )
    return query, key, value, call.normalizer, limits


@functools.cache
def _log_once(name, length, padded, blocks):
    _log.warning(
        "%s: length %d is padded to %d, a multiple of %d blocks of devices", name, length, padded, blocks
    )


def _specs(context, batch, heads, query, key, value, normalizer, limits):
    """How the arrays are split."""
    of_queries = PartitionSpec(batch, context, heads, None)
    of_keys = PartitionSpec(batch, context, heads if key.shape[2] > 1 else None, None)

    def of_batch(x):
        return None if x is None else PartitionSpec(batch if x.shape == query.shape[:1] else None)

    def of_ids(x):
        return None if x is None else PartitionSpec(batch, context)

    of_limits = replace(
        limits,
        offset=None if limits.offset is None else PartitionSpec(*[batch] * limits.offset.ndim),
        query_lengths=of_batch(limits.query_lengths),
        key_lengths=of_batch(limits.key_lengths),
        query_ids=of_ids(limits.query_ids),
        key_ids=of_ids(limits.key_ids),
    )
    of_normalizer = jax.tree.map(lambda leaf: PartitionSpec(*[heads] * leaf.ndim), normalizer)
    return of_queries, of_keys, of_keys, of_normalizer, of_limits


def _ring(visibility, order, size):
    """How far after itself a device first looks for keys, and how many devices' keys it meets.

    A window on both sides reaches only devices nearby.
    """
    n, left, right = order.num_devices, visibility.left, visibility.right
    is_known = visibility.num_queries == visibility.num_keys and visibility.offset is None
    if order.is_zigzag or not is_known or left is None or right is None:
        return 0, n
    before, after = (-(-reach // size) for reach in (left, right))
    return (after, before + after + 1) if before + after + 1 < n else (0, n)
