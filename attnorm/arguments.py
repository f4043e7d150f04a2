"""What the attention functions accept: every argument is checked, by name, before anything is traced."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from attnorm.dropout import Dropout
from attnorm.masks import Visibility
from attnorm.normalizers import Normalizer, get_normalizer
from attnorm.normalizers.rule import checked_floating, checked_rule

# No index reaches it, and sums of two such numbers stay inside int32.
_BEYOND_ALL = 2**30 - 1


class WeightsOptions(TypedDict, total=False):
    """The keyword arguments of :func:`attnorm.attention_weights`, for those who pass them on."""

    normalizer: str | Normalizer
    scale: float | None
    is_causal: bool
    query_offset: int | Int[Array, ""] | Int[Array, "B"]
    local_window_size: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    query_seq_lengths: Int[Array, "B"] | None
    key_value_seq_lengths: Int[Array, "B"] | None
    query_segment_ids: Int[Array, "*B T"] | None
    key_value_segment_ids: Int[Array, "*B S"] | None
    precision: jax.lax.PrecisionLike


class Options(WeightsOptions, total=False):
    """Those of :func:`attnorm.dot_product_attention`, but for ``return_log_norm``, on which its result depends."""

    dropout_rate: float
    dropout_rng: Array | None
    return_residual: bool
    implementation: str | Sequence[str] | None


@dataclass(frozen=True)
class Call:
    """A call in canonical form: batched, bias and mask of rank 4, restrictions gathered."""

    batched: bool
    query: Array
    key: Array
    value: Array | None
    bias: Array | None
    visibility: Visibility
    normalizer: Normalizer
    scale: float
    logits_soft_cap: float | None

    @property
    def counted_visibility(self) -> Visibility:
        """What is visible, with the number of keys as rules are told it: see :class:`attnorm.normalizers.rule.Place`."""
        if self.bias is None or self.logits_soft_cap is not None or "count" not in self.normalizer.needs:
            return self.visibility
        return self.visibility.counting(self.bias != -jnp.inf)


def checked_call(
    query,
    key,
    value,
    bias,
    mask,
    *,
    normalizer,
    scale,
    is_causal,
    query_offset,
    local_window_size,
    logits_soft_cap,
    query_seq_lengths,
    key_value_seq_lengths,
    query_segment_ids,
    key_value_segment_ids,
) -> Call:
    query, key, value = _checked_inputs(query, key, value)
    batched = query.ndim == 4
    if not batched:
        query, key = query[None], key[None]
        value = None if value is None else value[None]
    B, T, N, H = query.shape
    S = key.shape[1]

    normalizer = checked_normalizer(normalizer)
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    for leaf in jax.tree.leaves(normalizer):
        if jnp.shape(leaf) not in ((), (N,)):
            raise ValueError(
                f"normalizer: parameters of {type(normalizer).__name__} must have shape () or (N,) = ({N},), "
                f"got {jnp.shape(leaf)}"
            )
    normalizer = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), normalizer)

    if bias is not None:
        bias = _broadcast_rank("bias", bias, (B, N, T, S), batched)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"bias must be floating point, got {bias.dtype}")
    if mask is not None:
        mask = _broadcast_rank("mask", mask, (B, N, T, S), batched)
        if mask.dtype != jnp.bool_:
            raise TypeError(f"mask must be boolean, True where visible, got {mask.dtype}")

    if not isinstance(is_causal, bool | np.bool_):
        raise TypeError(f"is_causal must be a bool, got {is_causal!r}")
    left, right = _checked_window(local_window_size)
    if is_causal:
        right = 0
    query_offset = checked_offset(query_offset, B)
    query_segment_ids, key_segment_ids = _checked_segments(
        query_segment_ids, key_value_segment_ids, B, T, S, batched
    )
    needs_offset = normalizer.needs & {"position", "distance"}
    visibility = Visibility(
        num_queries=T,
        num_keys=S,
        left=left,
        right=right,
        # Without a band there is nothing to shift, unless the normaliser asks where a query stands.
        offset=query_offset if needs_offset or (left, right) != (None, None) else None,
        query_lengths=_checked_lengths("query_seq_lengths", query_seq_lengths, B, T, batched),
        key_lengths=_checked_lengths("key_value_seq_lengths", key_value_seq_lengths, B, S, batched),
        query_segment_ids=query_segment_ids,
        key_segment_ids=key_segment_ids,
        mask=mask,
    )
    return Call(
        batched,
        query,
        key,
        value,
        bias,
        visibility,
        normalizer,
        scale=H**-0.5 if scale is None else _checked_number("scale", scale),
        logits_soft_cap=None if logits_soft_cap is None else _checked_soft_cap(logits_soft_cap),
    )


def checked_normalizer(normalizer: str | Normalizer) -> Normalizer:
    """The normaliser itself, or that of the name."""
    if isinstance(normalizer, str):
        return get_normalizer(normalizer)
    if not isinstance(normalizer, Normalizer):
        raise TypeError(f"normalizer must be a name or a Normalizer, got {normalizer!r}")
    return checked_rule(normalizer)


def _checked_inputs(query, key, value):
    named = {"query": query, "key": key, "value": value}
    if value is None:
        named.pop("value")
    named = {name: checked_floating(name, x) for name, x in named.items()}
    query, key = named["query"], named["key"]
    if query.ndim not in (3, 4):
        raise ValueError(f"query must have shape (B, T, N, H) or (T, N, H), got {query.shape}")
    for name, x in named.items():
        if x.dtype != query.dtype:
            raise TypeError(f"{name} must have query's dtype {query.dtype}, got {x.dtype}")
        if x.ndim != query.ndim:
            raise ValueError(f"{name} must have query's rank {query.ndim}, got shape {x.shape}")
        if x.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{name} must have query's batch size {query.shape[0]}, got shape {x.shape}")
    T, N, H = query.shape[-3:]
    S, K, _ = key.shape[-3:]
    if H == 0 or key.shape[-1] != H:
        raise ValueError(f"key must have query's head dim {H}, at least 1, got shape {key.shape}")
    if "value" in named and named["value"].shape[-3:-1] != (S, K):
        raise ValueError(
            "key and value must have the same length and heads (S, K), "
            f"got key of shape {key.shape} and value of shape {named['value'].shape}"
        )
    if K == 0 or N % K:
        hint = ""
        if N > 4 * T:
            hint = "; the layout is (B, T, N, H), and these shapes look like (B, N, T, H)"
        raise ValueError(f"query heads N must be a multiple of key heads K, got N = {N} and K = {K}{hint}")
    return query, key, named.get("value")


def _broadcast_rank(name, x, full, batched):
    """x with rank 4, aligned to the right; every dimension 1 or full."""
    x = jnp.asarray(x)
    wanted = "(B, N, T, S)" if batched else "(N, T, S)"
    sizes = full if batched else full[1:]
    if x.ndim > 4 or (not batched and x.ndim == 4 and x.shape[0] != 1):
        raise ValueError(f"{name} must broadcast to {wanted} = {sizes}, got shape {x.shape}")
    expanded = x.reshape((1,) * (4 - x.ndim) + x.shape)
    if any(size not in (1, n) for size, n in zip(expanded.shape, full, strict=True)):
        raise ValueError(f"{name} must broadcast to {wanted} = {sizes}, got shape {x.shape}")
    return expanded


def _checked_window(window: int | tuple[int | None, int | None] | None) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    sides = (window, window) if isinstance(window, numbers.Integral) else window
    if not isinstance(sides, tuple | list) or len(sides) != 2:
        raise TypeError(f"local_window_size must be an int or (left, right), got {window!r}")
    for side in sides:
        if side is not None and (isinstance(side, bool) or not isinstance(side, numbers.Integral)):
            raise TypeError(f"local_window_size must hold ints or None, got {window!r}")
        if side is not None and side < 0:
            raise ValueError(f"local_window_size must not be negative, got {window!r}")
    left, right = (None if side is None or side >= _BEYOND_ALL else int(side) for side in sides)
    return left, right


def checked_offset(offset, B):
    """None for a plain 0, else int32 of shape () or (B,)."""
    if isinstance(offset, numbers.Integral) and offset == 0:
        return None
    offset = _integers("query_offset", offset)
    if offset.shape not in ((), (B,)):
        raise ValueError(f"query_offset must have shape () or (B,) = ({B},), got {offset.shape}")
    return _clipped(offset, -_BEYOND_ALL, _BEYOND_ALL)


def _checked_lengths(name, lengths, B, longest, batched):
    if lengths is None:
        return None
    return _clipped(_of_shape(name, _integers(name, lengths), (B,), batched), 0, longest)


def _integers(name, x):
    """An integer array, still of NumPy where it was not one of JAX: that would wrap what it cannot hold."""
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.integer):
        raise TypeError(f"{name} must hold integers, got {x.dtype}")
    return x


def _of_shape(name, x, shape, batched):
    """x of that shape, whose leading B = 1 may be absent where the inputs have no batch."""
    if not batched and x.shape == shape[1:]:
        x = x[None]
    if x.shape != shape:
        raise ValueError(f"{name} must have shape {shape if batched else shape[1:]}, got {x.shape}")
    return x


def _clipped(x, low, high):
    """x in int32, where what is beyond the limits means the same as the limits."""
    clip = jnp.clip if isinstance(x, jax.Array) else np.clip
    return jnp.asarray(clip(x, low, high)).astype(jnp.int32)


def _checked_ids(name, ids, shape, batched):
    if ids is None:
        return None
    ids = _of_shape(name, _integers(name, ids), shape, batched)
    is_known = not isinstance(ids, jax.core.Tracer) and (
        isinstance(ids, np.ndarray) or ids.is_fully_addressable
    )
    if is_known and ids.dtype.itemsize > 2 and ids.size:
        values = np.asarray(ids)  # inside a trace, jnp would trace even what is known
        low, high = int(values.min()), int(values.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"{name} must fit in int32, got values from {low} to {high}")
    return jnp.asarray(ids).astype(jnp.int32)


def _checked_segments(query_ids, key_ids, B, T, S, batched):
    query_ids = _checked_ids("query_segment_ids", query_ids, (B, T), batched)
    key_ids = _checked_ids("key_value_segment_ids", key_ids, (B, S), batched)
    if query_ids is None and key_ids is not None:
        raise ValueError("key_value_segment_ids needs query_segment_ids, got None")
    if query_ids is not None and key_ids is None:
        if T != S:
            raise ValueError(
                f"query_segment_ids alone needs T = S, got {T} and {S}; give key_value_segment_ids"
            )
        key_ids = query_ids
    return query_ids, key_ids


def _checked_number(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a Python number, got {value!r}")
    if not abs(value) <= float(np.finfo(np.float32).max):
        raise ValueError(f"{name} must be a finite number of float32, got {value!r}")
    return float(value)


def _checked_soft_cap(value):
    value = _checked_number("logits_soft_cap", value)
    if value <= 0:
        raise ValueError(f"logits_soft_cap must be positive, got {value!r}")
    return value


def checked_dropout(rate, rng):
    rate = _checked_number("dropout_rate", rate)
    if not 0 <= rate < 1:
        raise ValueError(f"dropout_rate must be in [0, 1), got {rate!r}")
    if rate == 0:
        return None
    if rng is None:
        raise ValueError(f"dropout_rng must be a PRNG key where dropout_rate = {rate} > 0, got None")
    return Dropout.from_key(rate, rng)
