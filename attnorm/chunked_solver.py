"""O(T)-memory attention for rules whose rows need a level that solves an equation (:class:`Leveled`).

A tile of few queries keeps its logits with all keys, while the level is found in several passes over them and used
in one more. That is half of the keys' and values' own memory (for 64 queries of head dim 64 on as many heads), and
costs less than to multiply queries and keys anew in every pass. The backward pass recomputes logits tile by tile, in
two passes: one for the row sums of the implicit derivative, one for the gradients. Tiles of keys in which no weight
is positive are skipped.

Axes and layout are those of :mod:`attnorm.tile_layout`.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from attnorm import _compat, chunked
from attnorm.dropout import Dropout
from attnorm.finite import finite_or_zero, has_nonfinite, nan_where
from attnorm.masks import Visibility, slice_tile
from attnorm.normalizers.rule import prepared
from attnorm.normalizers.tsallis import Leveled, Sums
from attnorm.tile_layout import (
    Static,
    add_bias_tile,
    dot,
    dropout_tile,
    from_key_tiles,
    from_query_tiles,
    grouped,
    key_tiles,
    keys_first,
    loop_spans,
    over_rows,
    pad_bias,
    places_of,
    query_tiles,
    scan_tiles,
    stack_tiles,
    sum_to,
)

SERVES = frozenset({"level", "rows", "map", "position", "count", "distance"})
# More of them at a time are no faster on a CPU, and their logits take more memory.
_MOST_QUERIES = 64


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Float[Array, "b n t s"] | None,
    visibility: Visibility,
    normalizer: Leveled,
    *,
    scale: float,
    logits_soft_cap: float | None,
    dropout: Dropout | None,
    precision,
) -> tuple[Float[Array, "B T N Hv"], None]:
    """Output in query's dtype; there is no log-norm. No dimension may be 0."""
    blocks = chunked.blocks_of(query)
    blocks = replace(blocks, query=min(blocks.query, _MOST_QUERIES))
    static = Static(chunked.sizes_of(query, key, blocks), scale, logits_soft_cap, precision)
    arrays = (query, key, value, bias, normalizer, visibility, dropout)
    # Inside shard_map every input must vary over the same axes; the transpose of this sums the gradients.
    return _attend(static, *_compat.vary_alike(arrays)), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, *arrays):
    return _attend_forward(static, *arrays)[0]


def _attend_forward(static, query, key, value, bias, normalizer, visibility, dropout):
    tiles = _Tiles.of(static, query, key, value, bias, normalizer, visibility, dropout)
    output, rows = stack_tiles(functools.partial(_output_of_queries, tiles), static.sizes.nq)
    output = from_query_tiles(static.sizes, output).astype(query.dtype)
    output = checkpoint_name(output, "attnorm_output")
    rows = checkpoint_name(rows, "attnorm_row_state")
    return output, (query, key, value, bias, normalizer, visibility, dropout, rows)


class _Rows(NamedTuple):
    """What the backward pass needs to know of a tile of queries. ``active``: tiles of keys with some weight."""

    m: Array
    level: Array
    active: Array


class _Tiles(NamedTuple):
    """The inputs of a call, cut into tiles."""

    static: Any
    rule: Leveled
    queries: Array
    keys: Array
    values: Array
    bias: Array | None
    padded: Visibility
    places: Any
    dropout: Dropout | None
    dtype: Any

    @staticmethod
    def of(static, query, key, value, bias, normalizer, visibility, dropout):
        sizes = static.sizes
        dtype = jnp.promote_types(query.dtype, jnp.float32)
        return _Tiles(
            static,
            over_rows(normalizer, sizes),
            query_tiles(sizes, query.astype(dtype) * static.scale),
            key_tiles(sizes, key.astype(dtype)),
            key_tiles(sizes, value.astype(dtype)),
            pad_bias(bias, sizes, dtype),
            visibility.padded(sizes.nq * sizes.bq, sizes.nk * sizes.bk),
            places_of(normalizer, visibility, sizes, dtype),
            dropout,
            dtype,
        )

    @property
    def tile_shape(self):
        sizes = self.static.sizes
        return (sizes.B, sizes.K, sizes.G, sizes.bq, sizes.bk)

    def rows_of(self, number):
        return _compat.vary_like(jnp.full((*self.tile_shape[:-1], 1), number, self.dtype), self.queries)

    def query(self, i):
        sizes = self.static.sizes
        return self.queries[i].reshape(sizes.B, sizes.K, sizes.G * sizes.bq, -1)

    def key_spans(self, i):
        sizes = self.static.sizes
        return self.padded.key_spans(i * sizes.bq, sizes.bq, sizes.bk, sizes.nk)

    def visible(self, i, j, masked):
        if not masked:
            return None
        sizes = self.static.sizes
        return grouped(self.padded.tile(i * sizes.bq, sizes.bq, j * sizes.bk, sizes.bk), sizes)

    def raw_logits(self, q, i, j):
        """Logits after bias and cap, and the cap's slope, or None."""
        sizes, cap = self.static.sizes, self.static.logits_soft_cap
        s = dot("bkih,bkjh->bkij", q, self.keys[j], self.static).reshape(self.tile_shape)
        if self.bias is not None:
            tile = slice_tile(self.bias, i * sizes.bq, sizes.bq, j * sizes.bk, sizes.bk)
            s = s + grouped(tile, sizes)
        if cap is None:
            return s, None
        capped = jnp.tanh(s / cap)
        return cap * capped, 1 - jnp.square(capped)

    def logits(self, q, i, j, masked):
        """The logits that the rule takes; -inf where hidden."""
        return _mapped(self.rule, self.raw_logits(q, i, j)[0], self.visible(i, j, masked), self.places(i, j))

    def kept(self, i, j):
        return dropout_tile(self.dropout, self.static.sizes, i, j, self.dtype)

    def flat(self, tile):
        sizes = self.static.sizes
        return tile.reshape(sizes.B, sizes.K, sizes.G * sizes.bq, -1)

    def if_active(self, active, visit, carry):
        """``visit(carry)`` where some key of the tile may have weight."""
        if not self.rule.has_zeros:
            return visit(carry)
        return jax.lax.cond(active, visit, lambda carry: carry, carry)


def _mapped(rule, s, visible, place):
    if "map" in rule.needs:
        s, visible = prepared(rule, s, visible, place)
    return s if visible is None else jnp.where(visible, s, -jnp.inf)


def _output_of_queries(tiles, i):
    """The output of one tile of queries, and its row state."""
    rule, static = tiles.rule, tiles.static
    spans = tiles.key_spans(i)
    m, tile_max, logits = _all_logits(tiles, i, spans)
    level = _solved(tiles, spans, m, tile_max, logits)
    active = _active(rule, tile_max - m, level)

    def key_tile(j, carry, masked):
        def visit(accumulator):
            visible, v = tiles.visible(i, j, masked), tiles.values[j]
            weights = rule.spread(rule.probabilities(logits[j] - m, level), tiles.places(i, j))
            if masked:
                weights = jnp.where(visible, weights, 0)
            if tiles.dropout is not None:
                weights = weights * tiles.kept(i, j)
            product = dot("bkij,bkjh->bkih", tiles.flat(weights), finite_or_zero(v) if masked else v, static)
            accumulator = accumulator + product.reshape(accumulator.shape)
            if masked:
                sees_marked = visible & has_nonfinite(v)[:, :, None, None, :]
                accumulator += nan_where(jnp.any(sees_marked, axis=-1, keepdims=True), tiles.dtype)
            return accumulator

        return tiles.if_active(active[j], visit, carry)

    zeros = jnp.zeros((*tiles.tile_shape[:-1], tiles.values.shape[-1]), tiles.dtype)
    output = loop_spans(spans, key_tile, _compat.vary_like(zeros, tiles.queries))
    return output, _Rows(m, level, active)


def _all_logits(tiles, i, spans):
    """The maximum of every row, its maxima over each tile of keys (nk, ...), and the logits (nk, ...)."""
    sizes, q = tiles.static.sizes, tiles.query(i)

    def key_tile(j, carry, masked):
        m, tile_max, logits = carry
        s = tiles.logits(q, i, j, masked)
        own_max = jnp.max(s, axis=-1, keepdims=True)
        return jnp.maximum(m, own_max), tile_max.at[j].set(own_max), logits.at[j].set(s)

    floor, hidden = tiles.rows_of(float(jnp.finfo(tiles.dtype).min)), tiles.rows_of(-jnp.inf)
    tile_max = jnp.broadcast_to(hidden, (sizes.nk, *hidden.shape))
    logits = jnp.broadcast_to(hidden, (sizes.nk, *tiles.tile_shape))
    return loop_spans(spans, key_tile, (floor, tile_max, logits))


def _solved(tiles, spans, m, tile_max, logits):
    """The level of every row."""
    rule = tiles.rule

    def sums_at(level):
        active = _active(rule, tile_max - m, level)

        def key_tile(j, sums, masked):
            def visit(sums):
                terms = rule.sums(logits[j] - m, level)
                return Sums(*map(_add_rows, sums, terms))

            return tiles.if_active(active[j], visit, sums)

        zero = tiles.rows_of(0)
        return loop_spans(spans, key_tile, Sums(zero, zero, zero))

    return rule.solved(sums_at, m, tiles.static.sizes.S)


def _add_rows(total, terms):
    return total + jnp.sum(terms, axis=-1, keepdims=True)


def _active(rule, d, level):
    """For each tile of keys, whether some row has weight there; d (nk, rows) is relative to the row's maximum."""
    return jnp.any(rule.has_weight(d, level), axis=tuple(range(1, d.ndim)))


def _attend_backward(static, residuals, d_output):
    """With u = ∂p/∂s at a level held fixed: ds = u (dp - Σ u dp / Σ u), and the same cotangent for parameters."""
    query, key, value, bias, normalizer, visibility, dropout, all_rows = residuals
    sizes = static.sizes
    tiles = _Tiles.of(static, query, key, value, bias, normalizer, visibility, dropout)
    d_outputs = query_tiles(sizes, d_output.astype(tiles.dtype))
    finite_queries, finite_keys = finite_or_zero(tiles.queries), finite_or_zero(tiles.keys)
    rule = tiles.rule

    def query_tile(carry, i):
        q, spans = tiles.query(i), tiles.key_spans(i)
        m, level, active = jax.tree.map(lambda x: x[i], all_rows)
        # A row that saw no key has no gradient, not even that of a NaN cotangent.
        sees_nothing = m == float(jnp.finfo(tiles.dtype).min)
        d_out = tiles.flat(jnp.where(sees_nothing, 0, d_outputs[i]))

        def rule_of_tile(j, masked):
            """Raw logits, the cap's slope, and how the rule maps logits and spreads p."""
            visible, place = tiles.visible(i, j, masked), tiles.places(i, j)
            return (
                *tiles.raw_logits(q, i, j),
                lambda s, rule: _mapped(rule, s, visible, place) - m,
                lambda p, rule: rule.spread(p, place),
            )

        def seen(x, j, masked):
            return jnp.where(tiles.visible(i, j, masked), x, 0) if masked else x

        def d_weights(j, masked):
            d = dot("bkih,bkjh->bkij", d_out, tiles.values[j], static).reshape(tiles.tile_shape)
            return seen(d if tiles.dropout is None else d * tiles.kept(i, j), j, masked)

        def row_sums(j, carry, masked):
            def visit(carry):
                s, _, mapped, spread = rule_of_tile(j, masked)
                p, pull_slope = jax.vjp(lambda d: rule.probabilities(d, level), mapped(s, rule))
                _, pull_spread = jax.vjp(lambda p: spread(p, rule), p)
                (u,), (dp,) = pull_slope(jnp.ones_like(p)), pull_spread(d_weights(j, masked))
                return _add_rows(carry[0], u * dp), _add_rows(carry[1], u)

            return tiles.if_active(active[j], visit, carry)

        pulled_sum, slope_sum = loop_spans(spans, row_sums, (tiles.rows_of(0), tiles.rows_of(0)))
        through_level = -pulled_sum / jnp.where(slope_sum == 0, 1, slope_sum)

        def key_tile(j, carry, masked):
            def visit(zeros):
                s, cap_slope, mapped, spread = rule_of_tile(j, masked)

                def both(s, rule):
                    p = rule.probabilities(mapped(s, rule), level)
                    return p, spread(p, rule)

                # Parameters are spread over the tile, so that the gradient of a hidden pair can be dropped.
                over_tile = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, s.shape), rule)
                (_, y), pull = jax.vjp(both, s, over_tile)
                ds, d_rule = pull((jnp.broadcast_to(through_level, s.shape), d_weights(j, masked)))
                if cap_slope is not None:
                    ds = ds * cap_slope
                y = y if tiles.dropout is None else y * tiles.kept(i, j)
                y, ds, d_rule = jax.tree.map(lambda x: seen(x, j, masked), (y, ds, d_rule))
                flat = tiles.flat(ds)
                return (
                    dot("bkij,bkjh->bkih", flat, finite_keys[j], static),
                    dot("bkij,bkih->bkjh", flat, finite_queries[i].reshape(q.shape), static),
                    dot("bkij,bkih->bkjh", tiles.flat(y), d_out, static),
                    None if tiles.bias is None else ds,
                    jax.tree.map(lambda x, zero: sum_to(x, zero.shape), d_rule, zeros[-1]),
                )

            # Outside the branch, so that no branch copies the gradients of all keys.
            dq, dk, dv, d_bias, d_rule = carry
            zeros = jax.tree.map(
                jnp.zeros_like,
                (dq, dk[j], dv[j], None if tiles.bias is None else tile_like, d_rule),
            )
            own_dq, own_dk, own_dv, ds, own_rule = tiles.if_active(active[j], visit, zeros)
            if tiles.bias is not None:
                d_bias = add_bias_tile(d_bias, keys_first(ds), sizes, i, j)
            d_rule = jax.tree.map(jnp.add, d_rule, own_rule)
            return dq + own_dq, dk.at[j].add(own_dk), dv.at[j].add(own_dv), d_bias, d_rule

        tile_like = jnp.broadcast_to(tiles.rows_of(0), tiles.tile_shape)
        dq, *carry = loop_spans(spans, key_tile, (jnp.zeros_like(q), *carry))
        return tuple(carry), dq.reshape(tiles.queries[i].shape)

    zeros = (
        jnp.zeros_like(tiles.keys),
        jnp.zeros_like(tiles.values),
        None if bias is None else jnp.zeros(tiles.bias.shape, tiles.dtype),
        jax.tree.map(jnp.zeros_like, tiles.rule),
    )
    (dk, dv, d_bias, d_rule), dq = scan_tiles(query_tile, _compat.vary_like(zeros, query), sizes.nq)
    dq = from_query_tiles(sizes, dq * static.scale).astype(query.dtype)
    dk = from_key_tiles(sizes, dk).astype(key.dtype)
    dv = from_key_tiles(sizes, dv).astype(value.dtype)
    if d_bias is not None:
        d_bias = d_bias[..., : bias.shape[-2], : bias.shape[-1]].astype(bias.dtype)
    d_normalizer = jax.tree.map(lambda a, b: b.reshape(a.shape), normalizer, d_rule)
    return dq, dk, dv, d_bias, d_normalizer, None, None


_attend.defvjp(_attend_forward, _attend_backward)
