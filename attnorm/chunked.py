"""O(T)-memory attention for any one-pass normaliser in plain JAX, with an exact custom VJP.

Tiles of queries meet tiles of keys; the logits of one tile pair are all that ever exists of the T × S matrix.
Tiles in which nothing is visible are never visited, and only those that need it are masked. The backward pass
recomputes each tile from q, k and the row state, by automatic differentiation of the rule's scalar functions.

Axes: B batch, K key heads, G query heads per key head, T queries, S keys, H and Hv head dims; i and j are the
positions inside a tile. Arrays cut into tiles have the tile's number as their first axis.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from attnorm import _compat
from attnorm.dropout import Dropout
from attnorm.finite import finite_or_zero, has_nonfinite, nan_where
from attnorm.masks import Visibility, slice_tile
from attnorm.normalizers.rule import Normalizer, Partial, combined, nothing_seen, prepared
from attnorm.rows import row_gradients, row_products, sees_nothing, sum_gradients
from attnorm.tile_layout import (
    Operands,
    Sizes,
    Static,
    add_bias_tile,
    as_operand,
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
from attnorm.tiling import even_block

SERVES = frozenset({"map", "position", "count", "distance", "numerators", "erf"})


@dataclass(frozen=True)
class BlockSizes:
    """How many queries and keys a tile holds at most. Used as a context, also around ``jax.jit``:

    >>> import jax.numpy as jnp
    >>> import attnorm
    >>> from attnorm import chunked
    >>> query, key, value = jnp.ones((3, 1, 128, 2, 64))
    >>> with chunked.block_sizes(chunked.BlockSizes(query=32, key=64)):
    ...     out = attnorm.dot_product_attention(query, key, value, implementation="chunked")
    >>> out.shape
    (1, 128, 2, 64)
    """

    query: int
    key: int

    def __post_init__(self):
        for name, size in (("query", self.query), ("key", self.key)):
            if not isinstance(size, int) or size < 1:
                raise ValueError(f"block size {name} must be a positive int, got {size!r}")


# None is the default for the number of heads.
block_sizes = jax.make_user_context(None)


def blocks_of(query: Float[Array, "B T N H"]) -> BlockSizes:
    """Those of the context, or the default."""
    return block_sizes.value or default_block_sizes(query.shape[0] * query.shape[2])


def default_block_sizes(num_heads: int) -> BlockSizes:
    """Larger tiles amortise the rescaling of the output, until those of all heads of the batch leave the cache."""
    size = 256 if num_heads <= 8 else 128
    return BlockSizes(size, size)


def attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Float[Array, "b n t s"] | None,
    visibility: Visibility,
    normalizer: Normalizer,
    *,
    scale: float,
    logits_soft_cap: float | None,
    dropout: Dropout | None,
    precision,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"] | None]:
    """Output in query's dtype, and the log-norm in float32 or wider. No dimension may be 0."""
    sizes = sizes_of(query, key, blocks_of(query))
    static = Static(sizes, scale, logits_soft_cap, precision)
    arrays = (query, key, value, bias, normalizer, visibility, dropout)
    # Inside shard_map every input must vary over the same axes; the transpose of this sums the gradients.
    return _attend(static, *_compat.vary_alike(arrays))


def partial_attend(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Float[Array, "b n t s"] | None,
    visibility: Visibility,
    normalizer: Normalizer,
    *,
    scale: float,
    logits_soft_cap: float | None,
    precision,
) -> Partial:
    """The row state over these keys only, (B, T, N, ...), to be merged with that over others. Not differentiable.

    Raises:
      ValueError: a normaliser that depends on the number of keys, where ``visibility.num_visible`` is not given.
    """
    if "count" in normalizer.needs and visibility.num_visible is None:
        raise ValueError(f"normalizer {normalizer} depends on the number of all keys, got a part of them")
    sizes = sizes_of(query, key, blocks_of(query))
    static = Static(sizes, scale, logits_soft_cap, precision)
    state = _forward(static, query, key, value, bias, normalizer, visibility, None)
    return jax.tree.map(lambda x: from_query_tiles(sizes, x), state)


def partial_gradients(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    visibility: Visibility,
    normalizer: Normalizer,
    m: Float[Array, "B T N 1"],
    d_output: Float[Array, "B T N Hv"],
    d_stats: tuple[Float[Array, "B T N 1"], ...],
    factor: tuple[Float[Array, "B T N 1"], ...] | None,
    *,
    scale: float,
    logits_soft_cap: float | None,
    precision,
) -> tuple[Array, Array, Array, Normalizer]:
    """What these keys add to dq and to the parameters' gradients, and their own dk and dv, in float32 or wider.

    From the reference m of whole rows, held constant, and the gradients of their ``Σ f v`` and statistics. Of several
    numerators the first are ``factor`` times ``d_output``.
    """
    sizes = sizes_of(query, key, blocks_of(query))
    static = Static(sizes, scale, logits_soft_cap, precision)
    m, d_output, d_stats, factor = jax.tree.map(
        functools.partial(query_tiles, sizes), (m, d_output, d_stats, factor)
    )
    dq, dk, dv, _, d_normalizer = _tile_gradients(
        static, m, d_output, d_stats, factor, query, key, value, None, normalizer, visibility, None
    )
    return dq, dk, dv, d_normalizer


def sizes_of(query, key, blocks: BlockSizes):
    B, T, N, _ = query.shape
    _, S, K, _ = key.shape
    return Sizes(B, T, S, K, N // K, _block(T, blocks.query), _block(S, blocks.key))


def _block(length, largest):
    """One tile needs no padding; of several, each is a multiple of the eight rows that vectorise well."""
    return length if length <= largest else even_block(length, largest, unit=8)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, bias, normalizer, visibility, dropout):
    state = _forward(static, query, key, value, bias, normalizer, visibility, dropout)
    return _finish(static, state, normalizer, query.dtype)


def _finish(static, state, normalizer, dtype):
    sizes = static.sizes
    output, log_norm = state.finalize(over_rows(normalizer, sizes))
    output = from_query_tiles(sizes, output).astype(dtype)
    return output, None if log_norm is None else jnp.squeeze(from_query_tiles(sizes, log_norm), -1)


def _attend_forward(static, query, key, value, bias, normalizer, visibility, dropout):
    state = _forward(static, query, key, value, bias, normalizer, visibility, dropout)
    output, log_norm = _finish(static, state, normalizer, query.dtype)
    output = checkpoint_name(output, "attnorm_output")
    rows = checkpoint_name((state.m, state.stats), "attnorm_row_state")
    sums = output
    if "numerators" in normalizer.needs:  # else the output and the row factor tell the one sum
        sums = checkpoint_name(state.accumulator, "attnorm_sums")
    residuals = (query, key, value, bias, normalizer, visibility, dropout, sums, rows)
    return (output, log_norm), residuals


def _forward(static, query, key, value, bias, normalizer, visibility, dropout) -> Partial:
    """The row state of all queries over all keys, by tiles of queries."""
    sizes = static.sizes
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    padded = visibility.padded(sizes.nq * sizes.bq, sizes.nk * sizes.bk)
    places = places_of(normalizer, visibility, sizes, dtype)
    bias = pad_bias(bias, sizes, dtype)
    rule = over_rows(normalizer, sizes)
    operands = Operands.of(query.dtype, static.scale)
    queries = query_tiles(sizes, query.astype(operands.dtype) * operands.query_factor)
    keys = key_tiles(sizes, key.astype(operands.dtype))
    values = key_tiles(sizes, value.astype(operands.dtype))

    def query_tile(i):
        q = queries[i].reshape(sizes.B, sizes.K, sizes.G * sizes.bq, -1)

        def key_tile(j, state, masked):
            k, v = keys[j], values[j]
            s = dot("bkih,bkjh->bkij", q, k, static).reshape(sizes.B, sizes.K, sizes.G, sizes.bq, sizes.bk)
            if operands.logit_factor != 1:
                s = s * operands.logit_factor
            if bias is not None:
                s = s + grouped(slice_tile(bias, i * sizes.bq, sizes.bq, j * sizes.bk, sizes.bk), sizes)
            if static.logits_soft_cap is not None:
                s = static.logits_soft_cap * jnp.tanh(s / static.logits_soft_cap)
            visible = None
            if masked:
                visible = grouped(padded.tile(i * sizes.bq, sizes.bq, j * sizes.bk, sizes.bk), sizes)
            s, _ = prepared(rule, s, visible, places(i, j))
            m = rule.next_reference(state.m, s)
            f, stats = rule.terms(s, m)
            sums, old = rule.carry(state.accumulator, state.stats, state.m, m)
            stats = tuple(
                h + jnp.sum(more, axis=-1, keepdims=True) for h, more in zip(old, stats, strict=True)
            )
            kept = None if dropout is None else dropout_tile(dropout, sizes, i, j, dtype)
            if visible is not None:
                sees_marked = visible & has_nonfinite(v)[:, :, None, None, :]
                mark = nan_where(jnp.any(sees_marked, axis=-1, keepdims=True), dtype)

            def add(total, f):
                f = f if kept is None else f * kept
                f = as_operand(f, operands).reshape(sizes.B, sizes.K, sizes.G * sizes.bq, sizes.bk)
                product = dot("bkij,bkjh->bkih", f, finite_or_zero(v) if masked else v, static)
                total = total + product.reshape(total.shape)
                return total + mark if masked else total

            return Partial(jax.tree.map(add, sums, f), m, stats)

        return loop_spans(
            padded.key_spans(i * sizes.bq, sizes.bq, sizes.bk, sizes.nk),
            key_tile,
            _empty_state(rule, sizes, values, dtype),
        )

    return stack_tiles(query_tile, sizes.nq)


def _attend_backward(static, residuals, cotangents):
    """dq, dk, dv, dbias and the parameters' gradients."""
    *arrays, sums, (m, stats) = residuals
    query, key, value, bias, normalizer, _, _ = arrays
    d_output, d_log_norm = cotangents
    sizes = static.sizes
    dtype = jnp.promote_types(query.dtype, jnp.float32)

    d_outputs = jnp.where(sees_nothing(stats), 0, query_tiles(sizes, d_output.astype(dtype)))
    if not isinstance(sums, tuple):
        sums = query_tiles(sizes, sums)
    rows = (sizes.nq, sizes.B, sizes.K, sizes.G * sizes.bq)

    def by_tile(x):
        return x.reshape(*rows, x.shape[-1])

    def products(own):
        return row_products(by_tile(d_outputs), by_tile(own), static.precision).reshape(stats[0].shape)

    delta = jax.tree.map(products, sums)
    if d_log_norm is not None:
        d_log_norm = query_tiles(sizes, d_log_norm[..., None])
    factor, d_stats, d_rows = row_gradients(over_rows(normalizer, sizes), stats, m, delta, d_log_norm)
    d_outputs = sum_gradients(d_outputs, factor)

    dq, dk, dv, d_bias, d_rule = _tile_gradients(static, m, d_outputs, d_stats, factor, *arrays)
    dq, dk, dv = (x.astype(own.dtype) for x, own in zip((dq, dk, dv), (query, key, value), strict=True))
    d_bias = None if bias is None else d_bias.astype(bias.dtype)
    d_normalizer = jax.tree.map(lambda own, of_tiles: own.reshape(of_tiles.shape) + of_tiles, d_rows, d_rule)
    return dq, dk, dv, d_bias, d_normalizer, None, None


def _tile_gradients(
    static, m, d_outputs, d_stats, factor, query, key, value, bias, normalizer, visibility, dropout
):
    """Gradients of the arrays and parameters from those of Σ f v and of the statistics, with m constant.

    Rows are in tiles of queries. Of several numerators the products share one ``d_outputs``, times ``factor`` each.
    Tiles of pairs are transposed (keys × queries), because CPUs multiply slowly by a transposed left side: so dv and
    dk need no transpose, and dq is accumulated transposed from keys transposed once.
    """
    sizes = static.sizes
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    padded = visibility.padded(sizes.nq * sizes.bq, sizes.nk * sizes.bk)
    places = places_of(normalizer, visibility, sizes, dtype, transposed=True)
    padded_bias = pad_bias(bias, sizes, dtype)
    operands = Operands.of(query.dtype, static.scale)
    queries = query_tiles(sizes, query.astype(operands.dtype) * operands.query_factor)
    keys = key_tiles(sizes, key.astype(operands.dtype))
    values = key_tiles(sizes, value.astype(operands.dtype))
    d_outputs = d_outputs.astype(operands.dtype)
    finite_keys_transposed = jnp.swapaxes(finite_or_zero(keys), -1, -2)
    # (nq, B, K, 1, G, bq)
    m, d_stats, factor = jax.tree.map(lambda x: jnp.moveaxis(x, -1, 3), (m, d_stats, factor))
    rule = over_rows(normalizer, sizes, transposed=True)
    flat = (sizes.B, sizes.K, sizes.bk, sizes.G * sizes.bq)

    def key_tile(carry, j):
        k, v, k_transposed = keys[j], values[j], finite_keys_transposed[j]

        def query_tile(i, carry, masked):
            dq_transposed, d_bias, d_rule, dk, dv = carry
            q = queries[i].reshape(sizes.B, sizes.K, sizes.G * sizes.bq, -1)
            d_out = d_outputs[i].reshape(sizes.B, sizes.K, sizes.G * sizes.bq, -1)
            if rule.needs_equal_logits:
                s = dot("bkih,bkjh->bkij", q, k, static)
                s = keys_first(s.reshape(sizes.B, sizes.K, sizes.G, sizes.bq, sizes.bk))
            else:
                s = dot("bkjh,bkih->bkji", k, q, static)
                s = s.reshape(sizes.B, sizes.K, sizes.bk, sizes.G, sizes.bq)
            if operands.logit_factor != 1:
                s = s * operands.logit_factor
            if padded_bias is not None:
                tile = slice_tile(padded_bias, i * sizes.bq, sizes.bq, j * sizes.bk, sizes.bk)
                s = s + keys_first(grouped(tile, sizes))
            if static.logits_soft_cap is not None:
                capped = jnp.tanh(s / static.logits_soft_cap)
                s = static.logits_soft_cap * capped
            visible = None
            if masked:
                visible = padded.tile(i * sizes.bq, sizes.bq, j * sizes.bk, sizes.bk)
                visible = keys_first(grouped(visible, sizes))
                if "map" not in rule.needs:
                    s = jnp.where(visible, s, -jnp.inf)
            place = places(i, j)

            def terms(s, rule):
                if "map" in rule.needs:  # else there is nothing to differentiate here
                    s, _ = prepared(rule, s, visible, place)
                f, stats = rule.terms(s, jax.tree.map(lambda x: x[i], m))
                if isinstance(f, tuple):  # weights, since no one factor could be put into d_outputs
                    f = combined(f, tuple(g[i] for g in factor))
                return f, stats

            # Parameters are spread over the tile, so that the gradient of a hidden pair can be dropped.
            spread = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, s.shape), rule)
            (f, _), pull = jax.vjp(terms, s, spread)
            df = dot("bkjh,bkih->bkji", v, d_out, static).reshape(s.shape)
            if dropout is not None:
                kept = keys_first(dropout_tile(dropout, sizes, i, j, dtype))
                f, df = f * kept, df * kept
            ds, d_spread = pull((df, tuple(jnp.broadcast_to(d[i], s.shape) for d in d_stats)))
            if static.logits_soft_cap is not None:
                ds = ds * (1 - jnp.square(capped))
            if visible is not None:
                # f too: a row that sees a NaN has a NaN for its m, also at the keys that it does not see.
                f, ds, d_spread = jax.tree.map(lambda x: jnp.where(visible, x, 0), (f, ds, d_spread))
            d_rule = jax.tree.map(lambda total, x: total + sum_to(x, total.shape), d_rule, d_spread)
            if d_bias is not None:
                d_bias = add_bias_tile(d_bias, ds, sizes, i, j)
            f, ds = (as_operand(x, operands).reshape(flat) for x in (f, ds))
            dv += dot("bkji,bkih->bkjh", f, d_out, static)
            dk += dot("bkji,bkih->bkjh", ds, finite_or_zero(q) if masked else q, static)
            dq_transposed = dq_transposed.at[i].add(dot("bkhj,bkji->bkhi", k_transposed, ds, static))
            return dq_transposed, d_bias, d_rule, dk, dv

        zeros = jnp.zeros_like(k, dtype), jnp.zeros_like(v, dtype)
        *carry, dk, dv = loop_spans(
            padded.query_spans(j * sizes.bk, sizes.bk, sizes.bq, sizes.nq), query_tile, (*carry, *zeros)
        )
        return tuple(carry), (dk, dv)

    dq_shape = (sizes.nq, sizes.B, sizes.K, query.shape[-1], sizes.G * sizes.bq)
    zeros = (
        jnp.zeros(dq_shape, dtype),
        None if bias is None else jnp.zeros(padded_bias.shape, dtype),
        jax.tree.map(jnp.zeros_like, rule),
    )
    (dq_transposed, d_bias, d_rule), (dk, dv) = scan_tiles(
        key_tile, _compat.vary_like(zeros, query), sizes.nk
    )

    dq = jnp.swapaxes(dq_transposed, -1, -2).reshape(*dq_shape[:3], sizes.G, sizes.bq, -1)
    dq = from_query_tiles(sizes, dq * static.scale)
    if d_bias is not None:
        d_bias = d_bias[..., : bias.shape[-2], : bias.shape[-1]]
    d_rule = jax.tree.map(lambda x, leaf: x.reshape(leaf.shape), d_rule, normalizer)
    dk, dv = from_key_tiles(sizes, dk * operands.logit_factor), from_key_tiles(sizes, dv)
    return dq, dk, dv, d_bias, d_rule


_attend.defvjp(_attend_forward, _attend_backward)


def _empty_state(rule, sizes, like, dtype):
    state = nothing_seen(rule, (sizes.B, sizes.K, sizes.G, sizes.bq), like.shape[-1], dtype)
    return _compat.vary_like(state, like)
