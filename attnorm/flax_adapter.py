"""attnorm's attention inside Flax's own attention modules, linen and nnx."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Num

from attnorm.arguments import Options, WeightsOptions
from attnorm.attention import attention_weights, dot_product_attention
from attnorm.normalizers import Normalizer, get_normalizer


def attention_fn(
    normalizer: str | Normalizer = "l2",
    *,
    scale: float | None = None,
    is_causal: bool = False,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    logits_soft_cap: float | None = None,
    implementation: str | tuple[str, ...] | None = None,
) -> Callable[..., Array]:
    """The ``attention_fn`` of ``linen.MultiHeadDotProductAttention`` and ``nnx.MultiHeadAttention``.

    The options are those of :func:`attnorm.dot_product_attention`; ``is_causal=True`` needs no mask, skips what
    it hides, and, like the modules' own argument of that name, does nothing in decoding, where the cache has its
    own mask. Two adapters with equal options are equal, so a rebuilt module compiles no second time.

    What the modules pass is served as follows. Inputs have any number of leading batch dimensions; ``mask`` is
    boolean or 0 and 1, as ``nn.make_causal_mask`` and ``nn.combine_masks`` make it; grouped-query heads, dropout
    with and without ``broadcast_dropout``, ``dtype``, ``precision`` and ``sow_weights`` (dense weights, before
    dropout) work. Logits and sums are always in float32 or wider. A query that sees no key gives 0, where Flax's
    own attention gives the mean of all values.

    Args:
      normalizer: a name (:func:`attnorm.normalizer_names`) or the result of :func:`attnorm.get_normalizer`.
      scale, is_causal, local_window_size, logits_soft_cap, implementation: as in
        :func:`attnorm.dot_product_attention`.

    Raises:
      TypeError: an option that does not exist.
      ValueError: an unknown normaliser; when called, an argument that is not accepted.
      NotImplementedError: when called, an einsum of the caller's own, ``input_positions``, or a local window in
        decoding.

    >>> import jax, jax.numpy as jnp
    >>> from flax import linen, nnx
    >>> from attnorm.flax_adapter import attention_fn
    >>> x = jnp.ones((2, 16, 32))
    >>> layer = linen.MultiHeadDotProductAttention(num_heads=4, attention_fn=attention_fn("l2", is_causal=True))
    >>> params = layer.init(jax.random.key(0), x)
    >>> layer.apply(params, x).shape
    (2, 16, 32)
    >>> layer = nnx.MultiHeadAttention(
    ...     4, 32, attention_fn=attention_fn("l2"), decode=False, rngs=nnx.Rngs(0))
    >>> layer(x, is_causal=True).shape
    (2, 16, 32)
    """
    if isinstance(normalizer, str):
        normalizer = get_normalizer(normalizer)
    elif not isinstance(normalizer, Normalizer):
        raise TypeError(f"normalizer must be a name or a Normalizer, got {normalizer!r}")
    return _AttentionFn(
        normalizer=normalizer,
        scale=scale,
        is_causal=is_causal,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        implementation=implementation,
    )


@dataclass(frozen=True)
class _AttentionFn:
    normalizer: Normalizer
    scale: float | None
    is_causal: bool
    local_window_size: int | tuple[int | None, int | None] | None
    logits_soft_cap: float | None
    implementation: str | tuple[str, ...] | None

    # linen passes only the keywords that it finds in this signature: one that is missing here, or is hidden in
    # **kwargs, would be dropped without a word.
    def __call__(
        self,
        query: Float[Array, "*batch T N H"],
        key: Float[Array, "*batch S K H"],
        value: Float[Array, "*batch S K Hv"],
        bias: Float[Array, "*#batch #N #T #S"] | None = None,
        mask: Num[Array, "*#batch #N #T #S"] | Bool[Array, "*#batch #N #T #S"] | None = None,
        *,
        broadcast_dropout: bool = True,
        dropout_rng: Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: jax.lax.PrecisionLike = None,
        module: Any = None,
        is_causal: bool = False,
        force_fp32_for_softmax: bool = True,
        qk_attn_weights_einsum: Callable | None = None,
        attn_weights_value_einsum: Callable | None = None,
        input_positions: Array | None = None,
    ) -> Float[Array, "*batch T N Hv"]:
        del force_fp32_for_softmax  # it always is
        if qk_attn_weights_einsum is not None or attn_weights_value_einsum is not None:
            raise NotImplementedError(
                "qk_attn_weights_einsum and attn_weights_value_einsum: attnorm computes logits and weights "
                "together, tile by tile, with products of its own"
            )
        if input_positions is not None:
            raise NotImplementedError(
                "input_positions: attnorm does not rotate queries and keys; rotate them before the attention"
            )
        dtype = jnp.result_type(query, key, value) if dtype is None else dtype
        query, key, value = (jnp.asarray(x, dtype) for x in (query, key, value))
        batch_shape = query.shape[:-3]
        for name, x in (("key", key), ("value", value)):
            if x.shape[:-3] != batch_shape:
                raise ValueError(f"{name} must have query's batch dims {batch_shape}, got shape {x.shape}")

        decoding = mask is not None and query.shape[-3] == 1
        if decoding and self.local_window_size is not None and key.shape[-3] > 1:
            raise NotImplementedError(
                "local_window_size in decoding: the module does not pass the position of the query; "
                "hide the keys outside the window by the mask"
            )
        query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in (query, key, value))
        if bias is not None:
            bias = _with_one_batch_dim("bias", bias, batch_shape)
        if mask is not None:
            mask = _with_one_batch_dim("mask", _as_bool(mask), batch_shape)
        options: WeightsOptions = dict(
            normalizer=self.normalizer,
            scale=self.scale,
            # A single query is at the end of the cache, not, as the band has it, at its start.
            is_causal=(is_causal or self.is_causal) and not decoding,
            local_window_size=self.local_window_size,
            logits_soft_cap=self.logits_soft_cap,
            precision=precision,
        )
        if module is not None:
            weights = attention_weights(query, key, bias, mask, **options)
            _sow(module, weights.astype(dtype).reshape(*batch_shape, *weights.shape[1:]))
        all_options: Options = {**options, "implementation": self.implementation}
        attend: Callable[..., Array] = dot_product_attention
        if not (deterministic or dropout_rate == 0):
            all_options |= dict(dropout_rate=dropout_rate, dropout_rng=dropout_rng)
            attend = _attend_with_one_dropout_mask if broadcast_dropout else dot_product_attention
        output = attend(query, key, value, bias, mask, **all_options)
        return output.reshape(*batch_shape, *output.shape[1:])


def _as_bool(mask: Array) -> Array:
    """True where a mask of 0 and 1 is 1; a mask of added values, such as -inf, means the opposite."""
    mask = jnp.asarray(mask)
    if mask.dtype == jnp.bool_:
        return mask
    # By NumPy: inside a trace, jnp would trace even what is known.
    is_known = not isinstance(mask, jax.core.Tracer) and mask.is_fully_addressable
    if is_known and not np.all(np.isin(mask, (0, 1))):
        raise ValueError(
            "mask must be boolean, or 0 where hidden and 1 where visible; add other values as bias"
        )
    return mask != 0


def _with_one_batch_dim(name: str, x: Array, batch_shape: tuple[int, ...]) -> Array:
    """Logit-shaped values with their leading batch dimensions merged, and kept at 1 where all of them are."""
    *leading, N, T, S = (1,) * (3 - x.ndim) + x.shape
    if math.prod(leading) == 1:
        return x.reshape(1, N, T, S)
    if len(leading) > len(batch_shape):
        raise ValueError(f"{name} must have at most the batch dims {batch_shape}, got shape {x.shape}")
    try:
        x = jnp.broadcast_to(x, (*batch_shape, N, T, S))
    except ValueError:
        raise ValueError(
            f"{name} must broadcast to the batch dims {batch_shape}, got shape {x.shape}"
        ) from None
    return x.reshape(-1, N, T, S)


def _sow(module: Any, weights: Array) -> None:
    collection = nnx.Intermediate if isinstance(module, nnx.Module) else "intermediates"
    module.sow(collection, "attention_weights", weights)


def _attend_with_one_dropout_mask(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    bias: Float[Array, "b n t s"] | None,
    mask: Bool[Array, "b n t s"] | None,
    *,
    normalizer: Normalizer,
    **options: Any,
) -> Float[Array, "B T N Hv"]:
    """Every batch entry and head is an attention of its own, with the same key and so the same dropped pairs."""
    # For its checks, which speak of the whole arrays.
    jax.eval_shape(
        lambda: dot_product_attention(query, key, value, bias, mask, normalizer=normalizer, **options)
    )
    group = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
    params, structure = jax.tree.flatten(normalizer)
    param_axes = [0 if jnp.ndim(param) else None for param in params]

    def one_head(query_TxH, key_SxH, value_SxV, bias, mask, params):
        query, key, value = (x[:, None] for x in (query_TxH, key_SxH, value_SxV))
        normalizer = jax.tree.unflatten(structure, params)
        return dot_product_attention(query, key, value, bias, mask, normalizer=normalizer, **options)[:, 0]

    def one_entry(query_TxNxH, key_SxNxH, value_SxNxV, bias, mask):
        (bias, bias_axis), (mask, mask_axis) = _leading(bias), _leading(mask)
        over_heads = jax.vmap(one_head, (1, 1, 1, bias_axis, mask_axis, param_axes), out_axes=1)
        return over_heads(query_TxNxH, key_SxNxH, value_SxNxV, bias, mask, params)

    (bias, bias_axis), (mask, mask_axis) = _leading(bias), _leading(mask)
    return jax.vmap(one_entry, (0, 0, 0, bias_axis, mask_axis))(query, key, value, bias, mask)


def _leading(x: Array | None) -> tuple[Array | None, int | None]:
    """The array, and the axis along which vmap cuts it; a first dimension of size 1 is shared instead."""
    if x is None:
        return None, None
    return (x[0], None) if x.shape[0] == 1 else (x, 0)
