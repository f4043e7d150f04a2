"""Fused attention on NVIDIA GPUs for any one-pass normaliser, as Pallas kernels with an exact custom VJP.

Two sets of kernels compute the tiles: for Hopper, in bfloat16 and float16, with its own matrix instruction
(gpu_hopper.py), and portable ones for all else (gpu_portable.py): float32, float16 by rules that take out no maximum
(then in float32), and A100, L4 and Blackwell. T4 and older cards, float64, head dims above 256 and dropout are not
served; the automatic choice then takes ``chunked``, or ``reference`` for normalisers that ``chunked`` does not serve
either. Where there is a bias, the output comes from the kernel and the gradients from ``chunked``, by its own forward
pass.

Registers and shared memory fix the block sizes; of :class:`attnorm.kernels.Config`, ``gpu`` and ``interpret`` are
heeded.

Letters: B batch, N query heads, K key heads, G query heads per key head, T queries, S keys, H and Hv head dims.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from attnorm import _compat, chunked, sharding
from attnorm.dropout import Dropout
from attnorm.finite import has_nonfinite, nan_where
from attnorm.kernels import gpu_hopper, gpu_portable
from attnorm.kernels.call import precision_asked, product_precision
from attnorm.kernels.settings import config, device
from attnorm.masks import Visibility
from attnorm.normalizers.rule import Normalizer
from attnorm.rows import row_gradients, sees_nothing

_LARGEST_HEAD_DIM = 256
# In order of preference.
_KERNELS = {"hopper": gpu_hopper, "portable": gpu_portable}


def supports(query: Array, normalizer: Normalizer, dropout: Dropout | None, precision) -> str | None:
    """Why these kernels cannot serve a call with a normaliser whose ``needs`` they serve, or None."""
    if dropout is not None:
        return "dropout is not supported"
    if query.shape[-1] > _LARGEST_HEAD_DIM:
        return f"head dim {query.shape[-1]} is not supported; up to {_LARGEST_HEAD_DIM} are"
    if product_precision(precision) is NotImplemented:
        return f"precision {precision_asked(precision)!r} is not supported"
    if sharding.is_partitioned_automatically(query):
        return "a kernel cannot be partitioned over a mesh with Auto axes; wrap the call in attnorm.sharded"
    if sharding.is_replicated_over_explicit_axes(query):
        return (
            "the query is replicated over Explicit axes; shard it along batch or heads, or use jax.shard_map"
        )
    dtype = _computed_in(query.dtype, normalizer)
    reasons = _refusals(dtype)
    if None in reasons.values():
        return None
    text = ", ".join(f"{reason} ({name} kernels)" for name, reason in reasons.items())
    if dtype != query.dtype:
        text += f"; {query.dtype} is computed in {dtype} for a rule whose numerators are not bounded"
    return text


def _computed_in(dtype, normalizer):
    """float16 does not hold the numerators of a rule that takes no maximum out of them."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 and not normalizer.uses_max else dtype


def _refusals(dtype):
    """Of each set of kernels that is allowed, why it cannot serve, or None."""
    names = _KERNELS if config.value.gpu is None else (config.value.gpu,)
    own = None if config.value.interpret else device()
    return {name: _KERNELS[name].refusal(dtype, own) for name in names}


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
    dropout: None,
    precision,
) -> tuple[Float[Array, "B T N Hv"], Float[Array, "B T N"] | None]:
    """Output in query's dtype, and the log-norm in float32. No dimension may be 0."""
    Hv = value.shape[-1]
    if Hv > _LARGEST_HEAD_DIM:  # in parts: a row of the output has to fit into registers
        parts = [
            attend(
                query,
                key,
                value[..., start : start + _LARGEST_HEAD_DIM],
                bias,
                visibility,
                normalizer,
                scale=scale,
                logits_soft_cap=logits_soft_cap,
                dropout=dropout,
                precision=precision,
            )
            for start in range(0, Hv, _LARGEST_HEAD_DIM)
        ]
        return jnp.concatenate([output for output, _ in parts], axis=-1), parts[0][1]
    dtype = _computed_in(query.dtype, normalizer)
    kernels = next(_KERNELS[name] for name, reason in _refusals(dtype).items() if reason is None)
    static = _Static(
        kernels=kernels,
        G=query.shape[2] // key.shape[2],
        scale=scale,
        logits_soft_cap=logits_soft_cap,
        left=visibility.left,
        right=visibility.right,
        precision=product_precision(precision),
        interpret=kernels.interpreter(config.value.interpret),
    )
    heads = query.shape[2:3]
    normalizer = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, heads), normalizer)
    arrays = (*(x.astype(dtype) for x in (query, key, value)), bias, normalizer, visibility)
    # Inside shard_map every input must vary over the same axes; the transpose of this sums the gradients.
    output, log_norm = _attend(static, *_compat.vary_alike(arrays))
    return output.astype(query.dtype), log_norm


@dataclass(frozen=True)
class _Static:
    """What is known when a kernel is built; ``kernels`` is the module that has them."""

    kernels: Any
    G: int
    scale: float
    logits_soft_cap: float | None
    left: int | None
    right: int | None
    precision: Any
    interpret: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static, query, key, value, bias, normalizer, visibility):
    return _attend_forward(static, query, key, value, bias, normalizer, visibility)[0]


def _attend_forward(static, *arrays):
    *_, normalizer, _ = arrays
    output, *rows = static.kernels.run_forward(static, *arrays)
    output = checkpoint_name(output, "attnorm_output")
    m, *stats = (jnp.swapaxes(x, 1, 2) for x in rows)
    # Whether a maximum notices a NaN is up to the hardware; a sum does.
    m = m + nan_where(jnp.isnan(stats[0]), m.dtype)
    m, stats = checkpoint_name((m, tuple(stats)), "attnorm_row_state")
    return (output, normalizer.log_norm(stats, m)), (arrays, output, m, stats)


def _attend_backward(static, residuals, cotangents):
    arrays, output, m, stats = residuals
    query, key, value, bias, normalizer, visibility = arrays
    if bias is not None:
        return _backward_with_bias(static, arrays, cotangents)
    d_output, d_log_norm = cotangents
    d_output = jnp.where(sees_nothing(stats)[..., None], 0, d_output)
    delta = jnp.sum(d_output.astype(jnp.float32) * output.astype(jnp.float32), axis=-1)
    g, d_stats, d_normalizer = row_gradients(normalizer, stats, m, delta, d_log_norm)
    # A row that has none but NaN to give must give it through g, to the keys that it sees: in a matrix product a NaN
    # of d_output would reach the others too.
    broken = jnp.isnan(m) | jnp.isnan(g) | has_nonfinite(d_output)
    d_output = jnp.where(broken[..., None], 0, d_output)
    rows = (m, g + nan_where(broken, g.dtype), *d_stats)
    rows = jnp.stack([jnp.swapaxes(x, 1, 2) for x in rows], axis=2)
    dq, dk, dv, d_rule = static.kernels.run_backward(
        static, query, key, value, normalizer, visibility, d_output, rows
    )
    d_normalizer = jax.tree.map(lambda a, b: a + jnp.sum(b, (0, 2)), d_normalizer, d_rule)
    return dq, dk, dv, None, d_normalizer, None


_attend.defvjp(_attend_forward, _attend_backward)


def _backward_with_bias(static, arrays, cotangents):
    """All gradients by ``chunked``, from its own forward pass."""
    *differentiable, visibility = arrays

    def attend(query, key, value, bias, normalizer):
        return chunked.attend(
            query,
            key,
            value,
            bias,
            visibility,
            normalizer,
            scale=static.scale,
            logits_soft_cap=static.logits_soft_cap,
            dropout=None,
            precision=static.precision,
        )

    _, pull = jax.vjp(attend, *differentiable)
    return *pull(cotangents), None
