"""How attention in plain JAX cuts its arrays into tiles, and loops over them.

Axes: B batch, K key heads, G query heads per key head, T queries, S keys, H and Hv head dims; i and j are the
positions inside a tile. Arrays cut into tiles have the tile's number as their first axis.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from attnorm.masks import slice_tile
from attnorm.places import tile_place


@dataclass(frozen=True)
class Sizes:
    """Dimensions, and how they are cut: nq tiles of bq queries, nk tiles of bk keys."""

    B: int
    T: int
    S: int
    K: int
    G: int
    bq: int
    bk: int

    @property
    def nq(self):
        return -(-self.T // self.bq)

    @property
    def nk(self):
        return -(-self.S // self.bk)


@dataclass(frozen=True)
class Static:
    """What is known when an attention is traced."""

    sizes: Sizes
    scale: float
    logits_soft_cap: float | None
    precision: Any


@dataclass(frozen=True)
class Operands:
    """What matrix products are fed: the dtype, and the factors of the scale in queries and in logits."""

    dtype: Any
    query_factor: float
    logit_factor: float

    @staticmethod
    def of(dtype, scale) -> Operands:
        """bfloat16 stays, as CPUs may multiply it faster; a scale that would round queries again is left to logits."""
        if dtype != jnp.bfloat16:  # float16 has no fast product on CPUs
            return Operands(jnp.promote_types(dtype, jnp.float32), scale, 1.0)
        if math.frexp(abs(scale))[0] in (0, 0.5):
            return Operands(dtype, scale, 1.0)
        return Operands(dtype, 1.0, scale)


# Layout.


def query_tiles(sizes, x):
    """(B, T, N, ...) -> (nq, B, K, G, bq, ...), padded with zeros."""
    B, T, N = x.shape[:3]
    x = jnp.pad(x, [(0, 0), (0, sizes.nq * sizes.bq - T)] + [(0, 0)] * (x.ndim - 2))
    x = x.reshape(B, sizes.nq, sizes.bq, sizes.K, sizes.G, *x.shape[3:])
    return jnp.moveaxis(x, (1, 2), (0, 4))


def from_query_tiles(sizes, x):
    """(nq, B, K, G, bq, ...) -> (B, T, N, ...)."""
    x = jnp.moveaxis(x, (0, 4), (1, 2))
    x = x.reshape(sizes.B, sizes.nq * sizes.bq, sizes.K * sizes.G, *x.shape[5:])
    return x[:, : sizes.T]


def key_tiles(sizes, x):
    """(B, S, K, H) -> (nk, B, K, bk, H), padded with zeros."""
    B, S, K, H = x.shape
    x = jnp.pad(x, [(0, 0), (0, sizes.nk * sizes.bk - S), (0, 0), (0, 0)])
    return jnp.transpose(x.reshape(B, sizes.nk, sizes.bk, K, H), (1, 0, 3, 2, 4))


def from_key_tiles(sizes, x):
    """(nk, B, K, bk, H) -> (B, S, K, H)."""
    x = jnp.transpose(x, (1, 0, 3, 2, 4))
    return x.reshape(sizes.B, sizes.nk * sizes.bk, sizes.K, -1)[:, : sizes.S]


def grouped(x, sizes):
    """(b, n, i, j) -> (b, K|1, G|1, i, j)."""
    if x.shape[1] == 1:
        return x[:, :, None]
    return x.reshape(x.shape[0], sizes.K, sizes.G, *x.shape[2:])


def keys_first(x):
    """(b, k, g, i, j) -> (b, k, j, g, i)."""
    return jnp.moveaxis(x, -1, 2)


def over_rows(normalizer, sizes, transposed=False):
    """Parameters of shape () or (N,) against (B, K, G, i, j), or transposed against (B, K, j, G, i)."""
    shape = (1, sizes.K, 1, sizes.G, 1) if transposed else (1, sizes.K, sizes.G, 1, 1)
    return jax.tree.map(lambda leaf: leaf.reshape(shape) if leaf.ndim else leaf, normalizer)


def places_of(normalizer, visibility, sizes, dtype, transposed=False):
    """A function of a tile's numbers (i, j): what the rule wants to know of its logits, in their layout."""
    counts = None
    if "count" in normalizer.needs:
        counts = visibility.counts()
        counts = jnp.pad(counts, [(0, 0), (0, 0), (0, sizes.nq * sizes.bq - sizes.T)])
        counts = grouped(counts[..., None], sizes)  # (b, K|1, G|1, T, 1)

    def of_tile(i, j):
        own = None if counts is None else slice_tile(counts, i * sizes.bq, sizes.bq, 0, 1)
        place = tile_place(normalizer, visibility, own, i * sizes.bq, sizes.bq, j * sizes.bk, sizes.bk, dtype)
        return jax.tree.map(keys_first, place) if transposed else place

    return of_tile


def pad_bias(bias, sizes, dtype):
    if bias is None:
        return None
    widths = [(0, 0), (0, 0)]
    for size, length in ((bias.shape[2], sizes.nq * sizes.bq), (bias.shape[3], sizes.nk * sizes.bk)):
        widths.append((0, 0 if size == 1 else length - size))
    return jnp.pad(bias, widths).astype(dtype)


def add_bias_tile(d_bias, ds, sizes, i, j):
    """Adds a transposed tile of logit gradients, summed over the axes along which the bias is broadcast."""
    tile = jnp.moveaxis(ds, 2, -1).reshape(sizes.B, sizes.K * sizes.G, sizes.bq, sizes.bk)
    first = (0, 0, 0 if d_bias.shape[2] == 1 else i * sizes.bq, 0 if d_bias.shape[3] == 1 else j * sizes.bk)
    start = tuple(jnp.asarray(x, jnp.int32) for x in first)
    shape = [1 if full == 1 else size for full, size in zip(d_bias.shape, tile.shape, strict=True)]
    old = jax.lax.dynamic_slice(d_bias, start, shape)
    return jax.lax.dynamic_update_slice(d_bias, old + sum_to(tile, shape), start)


def sum_to(x, shape):
    """x summed over the axes along which ``shape`` broadcasts to it."""
    x = jnp.sum(x, axis=tuple(range(x.ndim - len(shape))))
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and x.shape[axis] != 1)
    return jnp.sum(x, axis=axes, keepdims=True)


# Arithmetic and control.


def dot(spec, a, b, static):
    """The product in float32 or wider; those of bfloat16 are exact at every precision."""
    precision = None if a.dtype == jnp.bfloat16 else static.precision
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=wide)


def as_operand(x, operands):
    """x in the dtype of matrix products."""
    if operands.dtype != jnp.bfloat16:
        return x.astype(operands.dtype)
    # What a cast does, to the nearest and ties to even, in integers, which XLA on CPU does faster.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    bits = jnp.where(jnp.isnan(x), jnp.uint32(0x7FC00000), rounded)
    return jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)


def dropout_tile(dropout, sizes, i, j, dtype):
    shape = (sizes.B, sizes.K * sizes.G)
    tile = dropout.tile(shape, i * sizes.bq, sizes.bq, j * sizes.bk, sizes.bk)
    return grouped(tile, sizes).astype(dtype)


def loop_spans(spans, body, carry):
    """Runs ``body(tile, carry, masked)`` over the spans; a span of one tile known now needs no loop."""
    for start, stop, masked in spans:
        if isinstance(start, int) and isinstance(stop, int) and stop - start == 1:
            carry = body(start, carry, masked)
        else:
            carry = jax.lax.fori_loop(start, stop, functools.partial(_call, body, masked), carry)
    return carry


def _call(body, masked, tile, carry):
    return body(tile, carry, masked)


def stack_tiles(fn, count):
    if count == 1:
        return jax.tree.map(lambda x: x[None], fn(0))
    return jax.lax.map(fn, jnp.arange(count))


def scan_tiles(fn, carry, count):
    if count == 1:
        carry, out = fn(carry, 0)
        return carry, jax.tree.map(lambda x: x[None], out)
    return jax.lax.scan(fn, carry, jnp.arange(count))
