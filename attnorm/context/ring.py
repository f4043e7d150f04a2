"""Attention in which keys and values go round a ring of devices, with an exact custom VJP.

Every device keeps its queries and their row states, and meets the keys of all others in turn: those of the
next step are on their way while it computes with the present ones. The backward pass goes round once more,
from the states of whole rows, and the gradients of keys and values travel one step behind them.

Letters as everywhere; a device's arrays are (blocks, B, length, ...), of as many blocks as its order says.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from attnorm import _compat
from attnorm.context.limits import Limits
from attnorm.context.order import Order
from attnorm.masks import Visibility
from attnorm.normalizers.rule import Normalizer, merge, nothing_seen
from attnorm.rows import row_gradients, row_products, sees_nothing, sum_gradients


@dataclass(frozen=True)
class Static:
    """What is known when the ring is traced.

    ``tiles`` is the module of an implementation. A device meets the keys of ``steps`` devices: first of the
    one that is ``first`` places after it, then of those before that one.
    """

    order: Order
    tiles: ModuleType
    first: int
    steps: int
    scale: float
    logits_soft_cap: float | None
    precision: Any

    @property
    def options(self):
        return dict(scale=self.scale, logits_soft_cap=self.logits_soft_cap, precision=self.precision)


def attend(
    static: Static,
    query: Float[Array, "blocks B t N H"],
    key: Float[Array, "blocks B s K H"],
    value: Float[Array, "blocks B s K Hv"],
    normalizer: Normalizer,
    limits: Limits,
) -> tuple[Float[Array, "blocks B t N Hv"], Float[Array, "blocks B t N"] | None]:
    """Output in query's dtype, and the log-norm, of the queries that this device holds."""
    normalizer = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, query.shape[3:4]), normalizer)
    counts = None
    if "count" in normalizer.needs:
        counts = limits.counts(static.order, query.shape[2], key.shape[2])
    # The transpose of this sums the gradients of what several devices share.
    return _attend(static, *_compat.vary_alike((query, key, value, normalizer, limits, counts)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, normalizer, limits, counts):
    return _attend_forward(static, query, key, value, normalizer, limits, counts)[0]


def _attend_forward(static, query, key, value, normalizer, limits, counts):
    rule = _over_rows(normalizer)

    def meet(state, own, _, key, value, visibility):
        part = static.tiles.partial_attend(
            query[own], key, value, None, visibility, normalizer, **static.options
        )
        merged = merge(rule, jax.tree.map(lambda x: x[own], state), part)
        return jax.tree.map(lambda x, new: x.at[own].set(new), state, merged)

    def step(state, held, r):
        return _each_pair(static, query, limits, counts, meet, state, held, r)

    state = nothing_seen(rule, query.shape[:-1], value.shape[-1], jnp.promote_types(query.dtype, jnp.float32))
    state = _round(static, step, _compat.vary_like(state, query), (key, value, limits.key_ids))
    output, log_norm = state.finalize(rule)
    output = checkpoint_name(output.astype(query.dtype), "attnorm_output")
    rows = checkpoint_name((state.m, state.stats), "attnorm_row_state")
    sums = output
    if "numerators" in normalizer.needs:  # else the output and the row factor tell the one sum
        sums = checkpoint_name(state.accumulator, "attnorm_sums")
    log_norm = None if log_norm is None else log_norm[..., 0]
    return (output, log_norm), (query, key, value, normalizer, limits, counts, sums, rows)


def _attend_backward(static, residuals, cotangents):
    query, key, value, normalizer, limits, counts, sums, (m, stats) = residuals
    d_output, d_log_norm = cotangents
    d_output = jnp.where(sees_nothing(stats), 0, d_output.astype(stats[0].dtype))

    def by_block(x):
        return x.reshape(*x.shape[:2], -1, x.shape[-1])

    def products(own):
        return row_products(by_block(d_output), by_block(own), static.precision).reshape(stats[0].shape)

    d_log_norm = None if d_log_norm is None else d_log_norm[..., None]
    factor, d_stats, d_rows = row_gradients(
        _over_rows(normalizer), stats, m, jax.tree.map(products, sums), d_log_norm
    )
    d_normalizer = jax.tree.map(lambda own: own[:, 0], d_rows)
    d_sums = sum_gradients(d_output, factor)
    factors = factor if isinstance(factor, tuple) else None

    def meet(gradients, own, other, key, value, visibility):
        dq, d_rule, dk, dv = gradients
        rows = jax.tree.map(lambda x: x[own], (m, d_sums, d_stats, factors))
        *more, more_rule = static.tiles.partial_gradients(
            query[own], key, value, visibility, normalizer, *rows, **static.options
        )
        dq, dk, dv = (
            x.at[block].add(new)
            for x, block, new in zip((dq, dk, dv), (own, other, other), more, strict=True)
        )
        return dq, jax.tree.map(jnp.add, d_rule, more_rule), dk, dv

    def step(carry, held, r):
        dq, d_rule, travelling = carry
        arriving = _send(static, travelling, 1)  # what the devices before this one made of the same keys
        made = jax.tree.map(
            jnp.zeros_like, travelling
        )  # and not `arriving`, which would have to be waited for
        dq, d_rule, *made = _each_pair(static, query, limits, counts, meet, (dq, d_rule, *made), held, r)
        return dq, d_rule, jax.tree.map(jnp.add, arriving, tuple(made))

    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, stats[0].dtype), (query, normalizer, (key, value)))
    dq, d_rule, travelling = _round(
        static, step, _compat.vary_like(zeros, query), (key, value, limits.key_ids)
    )
    dk, dv = _send(static, travelling, static.first - (static.steps - 1))  # home
    dq, dk, dv = (x.astype(own.dtype) for x, own in zip((dq, dk, dv), (query, key, value), strict=True))
    return dq, dk, dv, jax.tree.map(jnp.add, d_normalizer, d_rule), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _over_rows(normalizer):
    """Parameters (N,) against (..., N, 1)."""
    return jax.tree.map(lambda leaf: leaf[:, None], normalizer)


def _round(static: Static, step: Callable, carry: Any, held: Any) -> Any:
    """``step(carry, held, r)`` for r = 0, 1, ..., with what each device to be met holds."""
    held = _send(static, held, -static.first)

    def body(both, r):
        carry, held = both
        following = _send(static, held, 1)  # depends on nothing that this step computes
        return (step(carry, held, r), following), None

    if static.steps > 1:
        (carry, held), _ = jax.lax.scan(body, (carry, held), jnp.arange(static.steps - 1))
    return step(carry, held, static.steps - 1)


def _send(static, tree, places):
    """Every device's arrays to the one that is so many places after it."""
    n = static.order.num_devices
    if places % n == 0:
        return tree
    pairs = [(d, (d + places) % n) for d in range(n)]
    return jax.tree.map(lambda x: jax.lax.ppermute(x, static.order.axis, pairs), tree)


def _each_pair(static, query, limits, counts, meet, carry, held, r):
    """``meet(carry, own, other, key, value, visibility)`` for every block of queries and of the keys held.

    Blocks of which no pair is visible do not meet.
    """
    order = static.order
    key, value, key_ids = held
    device = jax.lax.axis_index(order.axis)
    holder = (device + static.first - r) % order.num_devices

    def pair(carry, own, other):
        first_key = order.block(holder, other) * key.shape[2]
        visibility = replace(
            limits.visibility(
                own, order.block(device, own) * query.shape[2], query.shape[2], first_key, key.shape[2]
            ),
            key_segment_ids=None if key_ids is None else key_ids[other],
            first_key=first_key,
            num_visible=None if counts is None else counts[own],
        )
        return _where_visible(
            visibility, lambda carry: meet(carry, own, other, key[other], value[other], visibility), carry
        )

    if order.num_blocks == 1:
        return pair(carry, 0, 0)
    own, other = np.indices((order.num_blocks,) * 2).reshape(2, -1)
    return jax.lax.scan(lambda carry, numbers: (pair(carry, *numbers), None), carry, (own, other))[0]


def _where_visible(visibility: Visibility, meet: Callable, carry: Any) -> Any:
    """``meet(carry)`` where the band and the lengths leave some pair visible, else ``carry``."""
    spans = visibility.key_spans(0, visibility.num_queries, visibility.num_keys, 1)
    conditions = [span.start < span.stop for span in spans]
    if any(condition is True for condition in conditions):
        return meet(carry)
    return jax.lax.cond(functools.reduce(jnp.logical_or, conditions), meet, lambda carry: carry, carry)
