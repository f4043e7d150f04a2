"""Attention of new tokens over the slots of a cache, which hold their own keys and values too.

A cache without a window needs nothing special: :func:`attnorm.dot_product_attention` with ``is_causal=True`` and
``query_offset`` hides the slots after each query. Here is what a long cache and a windowed one need.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnorm import chunked
from attnorm.arguments import checked_call, checked_normalizer, checked_offset
from attnorm.attention import dot_product_attention
from attnorm.cache import require_whole
from attnorm.kernels import tpu
from attnorm.masks import Visibility
from attnorm.normalizers import Normalizer
from attnorm.normalizers.rule import Partial, checked_floating, merge

# What a rule needs to know of the order in which keys stand.
_NEEDS_ORDER = frozenset({"distance", "rows"})


def split_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    num_parts: int,
    normalizer: str | Normalizer = "l2",
    query_offset: int | Int[Array, ""] | Int[Array, "B"] = 0,
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "B T N Hv"]:
    """Causal attention whose keys are cut into parts that are computed side by side, and then merged.

    For few queries and many keys on a machine that a batch of B K heads does not fill. The parts are batch entries of
    one call, whose results (m, statistics, sums) merge exactly (:func:`attnorm.normalizers.rule.merge`); whatever a
    rule wants to know of position, distance or number of keys is that of the whole. All S keys are read, also those
    after the last query. Keys and values that are sharded along S over as many devices, on Auto axes, stay where they
    are: only row states are sent.

    Args:
      num_parts: divides S.
      query, key, value, normalizer, query_offset, scale, logits_soft_cap, precision: as in
        :func:`attnorm.dot_product_attention`, to which this is equal with ``is_causal=True``. Not differentiable.

    Raises:
      ValueError, TypeError: an argument that is not accepted; a number of parts that does not divide S.
      NotImplementedError: a normaliser that needs all keys of a row at once.

    >>> import jax, jax.numpy as jnp
    >>> import attnorm
    >>> key, value = jax.random.normal(jax.random.key(0), (2, 3, 512, 2, 16))
    >>> query, offset = jnp.ones((3, 1, 8, 16)), jnp.array([10, 200, 511])
    >>> split = attnorm.split_attention(query, key, value, num_parts=4, query_offset=offset)
    >>> whole = attnorm.dot_product_attention(query, key, value, is_causal=True, query_offset=offset)
    >>> print(jnp.allclose(split, whole, atol=1e-5))
    True
    """
    call = checked_call(
        query,
        key,
        checked_floating("value", value),
        None,
        None,
        normalizer=normalizer,
        scale=scale,
        is_causal=True,
        query_offset=query_offset,
        local_window_size=None,
        logits_soft_cap=logits_soft_cap,
        query_seq_lengths=None,
        key_value_seq_lengths=None,
        query_segment_ids=None,
        key_value_segment_ids=None,
    )
    require_whole("num_parts", num_parts, 1)
    (B, T), S = call.query.shape[:2], call.key.shape[1]
    assert call.value is not None  # only attention_weights has none
    if 0 in (*call.query.shape, *call.value.shape):
        raise ValueError(
            f"query, key and value must not be empty, got {query.shape}, {key.shape}, {value.shape}"
        )
    if S % num_parts:
        raise ValueError(f"num_parts must divide the number of keys S = {S}, got {num_parts}")
    missing = call.normalizer.needs - chunked.SERVES
    if missing:
        raise NotImplementedError(
            f"normalizer {call.normalizer} needs {', '.join(sorted(missing))}, which parts of the keys do not tell"
        )
    size = S // num_parts
    offset_B = _of_rows(call.visibility.offset, B)
    first_key = (jnp.arange(num_parts, dtype=jnp.int32) * size).repeat(B)
    counts = None
    if "count" in call.normalizer.needs:
        counts = jnp.tile(jnp.broadcast_to(call.visibility.counts(), (B, 1, T)), (num_parts, 1, 1))
    parts = _partial_attend(
        jnp.tile(call.query, (num_parts, 1, 1, 1)),
        _cut(call.key, num_parts),
        _cut(call.value, num_parts),
        Visibility(
            num_queries=T,
            num_keys=size,
            right=0,
            offset=jnp.tile(offset_B, num_parts) - first_key,
            first_key=first_key,
            num_visible=counts,
        ),
        call.normalizer,
        scale=call.scale,
        logits_soft_cap=call.logits_soft_cap,
        precision=precision,
    )
    parts = jax.tree.map(lambda x: x.reshape(num_parts, B, *x.shape[1:]), parts)
    rule = jax.tree.map(lambda leaf: leaf[:, None] if leaf.ndim else leaf, call.normalizer)
    output, _ = _merged(rule, parts, num_parts).finalize(rule)
    output = output.astype(call.query.dtype)
    return output if call.batched else output[0]


def _cut(x: Float[Array, "B S K H"], num_parts: int) -> Float[Array, "P*B S/P K H"]:
    # With the parts outermost, slots that are sharded over as many devices stay where they are.
    B, S = x.shape[:2]
    parts = jnp.moveaxis(x.reshape(B, num_parts, S // num_parts, *x.shape[2:]), 1, 0)
    return parts.reshape(num_parts * B, *parts.shape[2:])


def _partial_attend(query, key, value, visibility, normalizer, **options) -> Partial:
    is_served = not normalizer.needs and tpu.supports(query, normalizer, None, options["precision"]) is None
    module = tpu if jax.default_backend() == "tpu" and is_served else chunked
    return module.partial_attend(query, key, value, None, visibility, normalizer, **options)


def _merged(rule: Normalizer, parts: Partial, num_parts: int) -> Partial:
    """The row state over all keys, (B, T, N, ...), from (P, B, T, N, ...)."""
    states = [jax.tree.map(lambda x: x[p], parts) for p in range(num_parts)]  # noqa: B023
    return functools.reduce(functools.partial(merge, rule), states)


def _of_rows(offset: Int[Array, ""] | Int[Array, "B"] | None, batch_size: int) -> Int[Array, "B"]:
    return jnp.broadcast_to(jnp.int32(0) if offset is None else offset, batch_size)


def windowed_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    *,
    window: int,
    query_offset: int | Int[Array, ""] | Int[Array, "B"],
    normalizer: str | Normalizer = "l2",
    scale: float | None = None,
    logits_soft_cap: float | None = None,
    precision: jax.lax.PrecisionLike = None,
    implementation: str | tuple[str, ...] | None = None,
) -> Float[Array, "B T N Hv"]:
    """Causal attention to the last ``window`` keys and the query's own, where position p is in slot p mod S.

    Args:
      window: with T at most S in sum, so that new tokens have replaced none that the first of them sees.
      query_offset: position of the first query; its row has the keys up to that of the last.
      query, key, value, normalizer, scale, logits_soft_cap, precision, implementation: as in
        :func:`attnorm.dot_product_attention`, to which this is equal, for keys in the order of their positions, with
        ``is_causal=True, local_window_size=(window, 0)``.

    Keys are taken as they stand, but for normalisers that ask for distances or for a whole row, for which they are
    first copied into their order.

    Raises:
      ValueError, TypeError: an argument that is not accepted.
      NotImplementedError: a normaliser that asks for distances or a whole row, and for absolute positions too.

    >>> import jax.numpy as jnp
    >>> import attnorm
    >>> positions_in_slots = jnp.array([8, 9, 2, 3, 4, 5, 6, 7])
    >>> value = jnp.broadcast_to(positions_in_slots.astype(float)[None, :, None, None], (1, 8, 1, 4))
    >>> out = attnorm.windowed_attention(
    ...     jnp.ones((1, 1, 1, 4)), jnp.zeros((1, 8, 1, 4)), value, window=2, query_offset=9, normalizer="softmax")
    >>> print(out[0, 0, 0, 0])  # the mean of 7, 8 and 9
    8.0
    """
    query, key, value = (checked_floating(*x) for x in (("query", query), ("key", key), ("value", value)))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim != 4:
            raise ValueError(f"{name} must have shape (B, length, heads, head dim), got {x.shape}")
    (B, T), S = query.shape[:2], key.shape[1]
    require_whole("window", window, 0)
    if window + T > S:
        raise ValueError(f"window must be at most S - T = {S} - {T}, got {window}")
    offset_B = _of_rows(checked_offset(query_offset, B), B)
    normalizer = checked_normalizer(normalizer)
    attend = functools.partial(
        dot_product_attention,
        normalizer=normalizer,
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        precision=precision,
        implementation=implementation,
    )
    slots = jnp.arange(S)
    if not normalizer.needs & _NEEDS_ORDER:
        position_BxTx1 = offset_B[:, None, None] + jnp.arange(T)[:, None]
        # Keys after the query's have the largest distances in this sense, beyond the window.
        distance = (position_BxTx1 - slots) % S
        visible = distance <= jnp.minimum(window, position_BxTx1)
        return attend(query, key, value, mask=visible[:, None], query_offset=offset_B)
    if "position" in normalizer.needs:
        raise NotImplementedError(
            f"normalizer {normalizer} needs position, and distance or rows: not in a windowed cache"
        )
    first_Bx1 = offset_B[:, None] + T - S
    order = ((first_Bx1 + slots) % S)[:, :, None, None]
    key, value = (jnp.take_along_axis(x, order, axis=1) for x in (key, value))
    exists = first_Bx1 + slots >= 0
    return attend(
        query,
        key,
        value,
        mask=exists[:, None, None],
        is_causal=True,
        query_offset=S - T,
        local_window_size=(window, 0),
    )
