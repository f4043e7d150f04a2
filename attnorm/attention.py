"""The public attention functions: what they accept, and which implementation serves a call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from typing import Literal, Unpack, overload

import jax
from jaxtyping import Array, Bool, Float, Int

from attnorm import chunked, chunked_rows, chunked_solver, reference, sharding
from attnorm.arguments import Options, checked_call, checked_dropout
from attnorm.kernels import gpu, tpu
from attnorm.normalizers import Normalizer
from attnorm.normalizers.rule import checked_floating

_IMPLEMENTATIONS = {"reference": reference, "chunked": chunked, "pallas_tpu": tpu, "pallas_gpu": gpu}
# What an automatic choice tries, in order.
_PREFERRED = {
    "tpu": ("pallas_tpu", "chunked", "reference"),
    "gpu": ("pallas_gpu", "chunked", "reference"),
}
_IMPLEMENTATIONS_OF_JAX = ("xla", "cudnn")
_log = logging.getLogger(__name__)


@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "*#B #N #T #S"] | None = None,
    mask: Bool[Array, "*#B #N #T #S"] | None = None,
    *,
    return_log_norm: Literal[False] = False,
    **options: Unpack[Options],
) -> Float[Array, "*B T N Hv"]: ...


@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "*#B #N #T #S"] | None = None,
    mask: Bool[Array, "*#B #N #T #S"] | None = None,
    *,
    return_log_norm: Literal[True],
    **options: Unpack[Options],
) -> tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]: ...


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "*#B #N #T #S"] | None = None,
    mask: Bool[Array, "*#B #N #T #S"] | None = None,
    *,
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
    dropout_rate: float = 0.0,
    dropout_rng: Array | None = None,
    precision: jax.lax.PrecisionLike = None,
    return_log_norm: bool = False,
    return_residual: bool = False,
    implementation: str | Sequence[str] | None = None,
) -> Float[Array, "*B T N Hv"] | tuple[Float[Array, "*B T N Hv"], Float[Array, "*B T N"]]:
    r"""Attention with any normaliser of its weights; a drop-in for ``jax.nn.dot_product_attention``.

    .. math::
      \mathrm{out}_i = \sum_j y_{ij} v_j, \qquad
      y_{ij} = \mathrm{normalizer}_j(s_{ij}), \qquad
      s_{ij} = \mathrm{cap}(\mathrm{scale} \langle q_i, k_j \rangle + \mathrm{bias}_{ij})

    over the keys j that query i may see, by default with the L2 softmax :math:`y = e^s / \|e^s\|_2`.

    Letters: B batch, T query length, S key length, N query heads, K key and value heads, H head dim of query and
    key, Hv head dim of value. B may be absent.

    Args:
      query: (B, T, N, H), or (T, N, H).
      key: (B, S, K, H). N is a multiple of K; query head n uses key head n // (N // K).
      value: (B, S, K, Hv).
      bias: added to the scaled logits. Each dimension is 1 or full; lower ranks are aligned to the right: (S,),
        (T, S), (N, T, S).
      mask: boolean, True where a query may see a key; shapes as of bias.
      normalizer: a name (:func:`attnorm.normalizer_names`) or the result of :func:`attnorm.get_normalizer`, whose
        array parameters are scalars or have shape (N,) and receive exact gradients.
      scale: factor of the logits, by default ``H**-0.5``.
      is_causal: key j is visible to query i only if ``j <= i + query_offset``.
      query_offset: position of the first query among the keys, as in decoding; an int, or an integer array of
        shape () or (B,).
      local_window_size: (left, right), or one int for both: only keys with
        ``i + query_offset - left <= j <= i + query_offset + right`` are visible. None is unbounded.
      logits_soft_cap: c > 0 replaces logits s by ``c tanh(s / c)``, after the bias and before all masks.
      query_seq_lengths: (B,). Rows from there on are 0.
      key_value_seq_lengths: (B,). Keys from there on are hidden.
      query_segment_ids: (B, T). A query sees a key only if their ids are equal.
      key_value_segment_ids: (B, S). May be left out where T = S: the queries' ids are then used for both.
      dropout_rate: probability in [0, 1) that a normalised weight is dropped; those kept are scaled up.
      dropout_rng: a PRNG key, required where the rate is positive.
      precision: of the matrix products, as in ``jax.lax.dot_general``.
      return_log_norm: also return λ, with weights ``exp(s - λ)``; differentiable. Where the normaliser scales or
        shifts its logits s, they are those after that; where its weights have no such form, it is refused.
      return_residual: only False; ``jax.nn``'s logsumexp is ``return_log_norm`` with ``normalizer="softmax"``.
      implementation: ``"reference"`` (dense, any order of differentiation), ``"chunked"`` (O(T + S) memory, reverse
        mode), ``"pallas_tpu"`` (fused, reverse mode, no dropout, no float64; :class:`attnorm.kernels.Config`),
        ``"pallas_gpu"`` (likewise, on NVIDIA GPUs of compute capability 8.0 and newer), a sequence of names to try
        in order, or None for the best on this platform.

    Returns:
      The output (B, T, N, Hv), in query's dtype; with ``return_log_norm`` also λ (B, T, N), in float32 (float64 for
      float64 inputs). Logits and sums are in float32 or wider. A row that sees no key is 0, with zero gradients and
      λ = -inf (b for a sink). Keys, values and biases at hidden positions influence nothing, also when NaN. (A bias
      of -inf gives a key no weight, but hides no NaN in its value.)

    Raises:
      ValueError: a shape, value, name or combination of arguments that is not accepted.
      TypeError: a dtype or type that is not accepted. Also jax's own, when forward-mode differentiation
        (``jvp``, ``hessian``) meets an implementation other than ``"reference"``.
      NotImplementedError: no implementation that was named can serve the call; the message says why.

    >>> import jax, jax.numpy as jnp
    >>> import attnorm
    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 128, 4, 16))
    >>> out = attnorm.dot_product_attention(query, key, value, is_causal=True)
    >>> out.shape
    (2, 128, 4, 16)
    >>> print(jnp.round(jnp.var(out[:, -1]), 0))
    1.0
    """
    arguments = dict(locals())  # before any other name is bound
    if return_residual:
        raise ValueError(
            "return_residual is not supported; use return_log_norm=True, which is differentiable"
        )
    call = checked_call(
        query,
        key,
        checked_floating("value", value),
        bias,
        mask,
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
    dropout = checked_dropout(dropout_rate, dropout_rng)
    if (axes := sharding.explicit_axes(call.query)) is not None:
        return sharding.over_explicit_axes(dot_product_attention, arguments, *axes)
    attend = _chosen(implementation, call.query, call.normalizer, dropout, precision)
    assert call.value is not None  # only attention_weights has none
    if 0 in (*call.query.shape, *call.value.shape):
        attend = reference.attend  # nothing to cut into tiles
    output, log_norm = attend(
        call.query,
        call.key,
        call.value,
        call.bias,
        call.counted_visibility,
        call.normalizer,
        scale=call.scale,
        logits_soft_cap=call.logits_soft_cap,
        dropout=dropout,
        precision=precision,
    )
    output = output if call.batched else output[0]
    if not return_log_norm:
        return output
    return output, log_norm if call.batched else log_norm[0]


def attention_weights(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    bias: Float[Array, "*#B #N #T #S"] | None = None,
    mask: Bool[Array, "*#B #N #T #S"] | None = None,
    *,
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
) -> Float[Array, "*B N T S"]:
    """The dense weights (B, N, T, S) of :func:`dot_product_attention`, in float32 or wider, for looking at.

    Arguments and errors are those of :func:`dot_product_attention`. O(T S) memory.

    >>> import jax, jax.numpy as jnp
    >>> import attnorm
    >>> query, key = jax.random.normal(jax.random.key(0), (2, 5, 1, 8))
    >>> weights = attnorm.attention_weights(query, key, is_causal=True)
    >>> print(jnp.round(jnp.sum(weights**2, axis=-1), 3))
    [[1. 1. 1. 1. 1.]]
    """
    arguments = dict(locals())  # before any other name is bound
    call = checked_call(
        query,
        key,
        None,
        bias,
        mask,
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
    if (axes := sharding.explicit_axes(call.query)) is not None:
        return sharding.over_explicit_axes(attention_weights, arguments, *axes, returns_weights=True)
    weights, _ = reference.weights(
        call.query,
        call.key,
        call.bias,
        call.counted_visibility,
        call.normalizer,
        scale=call.scale,
        logits_soft_cap=call.logits_soft_cap,
        precision=precision,
    )
    return weights if call.batched else weights[0]


def implementations_of(normalizer: Normalizer) -> tuple[str, ...]:
    """The names of the implementations that serve this normaliser."""
    return tuple(
        name for name in _IMPLEMENTATIONS if not_served(normalizer, _module(name, normalizer)) is None
    )


def implementations_for(platform: str) -> tuple[str, ...]:
    """The names of the implementations to try on a platform, best first."""
    return _PREFERRED.get(platform, ("chunked", "reference"))


def _module(name, normalizer):
    if name == "chunked" and "level" in normalizer.needs:
        return chunked_solver
    if name == "chunked" and "rows" in normalizer.needs:
        return chunked_rows
    return _IMPLEMENTATIONS[name]


def not_served(normalizer, module):
    """What the normaliser needs and the implementation does not serve, or None."""
    missing = normalizer.needs - getattr(module, "SERVES", frozenset())
    if not missing:
        return None
    # Of arrays the types alone: to print their numbers would wait for the device, in a call that another will serve.
    described = jax.tree.map(jax.typeof, normalizer)
    return f"normalizer {described} needs {', '.join(sorted(missing))}"


def _chosen(implementation: str | Sequence[str] | None, query, normalizer, dropout, precision):
    """The first of the implementations asked for that can serve the call."""
    names: Sequence[str]
    if implementation is None:
        names = implementations_for(jax.default_backend())
    else:
        names = (implementation,) if isinstance(implementation, str) else implementation
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) for name in names):
        raise TypeError(f"implementation must be None, a name or a sequence of names, got {implementation!r}")
    for name in names:
        if name not in _IMPLEMENTATIONS:
            hint = ""
            if name in _IMPLEMENTATIONS_OF_JAX:
                hint = "; that is a name of jax.nn.dot_product_attention"
            raise ValueError(f"implementation must be one of {list(_IMPLEMENTATIONS)}, got {name!r}{hint}")
    reasons: list[str] = []
    for name in names:
        module = _module(name, normalizer)
        reason = not_served(normalizer, module)
        if reason is None and hasattr(module, "supports"):
            reason = module.supports(query, normalizer, dropout, precision)
        if reason is None:
            if reasons:
                _log_once(name, "; ".join(reasons))
            return module.attend
        reasons.append(f"{name}: {reason}")
    raise NotImplementedError(
        f"implementation {implementation!r} cannot serve this call: {'; '.join(reasons)}"
    )


@functools.cache
def _log_once(name, reasons):
    _log.debug("attention by %s, because %s", name, reasons)
