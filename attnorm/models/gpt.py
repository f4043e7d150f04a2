"""A decoder: GPT-2, and what became of it since. Each choice is a field of :class:`GPTConfig`."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from attnorm import output_norms
from attnorm.cache import Cache, check_vocabulary, checked_counts, make_cache
from attnorm.models.activations import split_over_mesh
from attnorm.models.fields import require_types
from attnorm.models.positions import (
    ALIBI_FEATURES,
    ROPE_SCALINGS,
    rope_frequencies,
    rotate,
    with_alibi,
    yarn_logit_factor,
)
from attnorm.models.stack import REMAT_POLICIES, make_stack, run_stack

# attention_fn(query, key, value, scale=..., logits_soft_cap=...); query (B, T, N, H), key and value (B, T, K, H).
# Which keys a query may see, and how weights are normalised, is up to the function.
AttentionFn = Callable[..., Float[Array, "B T N H"]]

NORMS = ("layer", "rms")
MLPS = ("gelu", "relu2", "swiglu")
POSITIONS = ("learned", "rope", "alibi", "none")
# Functions of (output, eps), and the eps that 0 stands for: AVnorm.
_OUTPUT_NORMS = {
    "head_layer": (output_norms.head_layer, 1e-5),
    "head_rms": (output_norms.head_rms, 1e-6),
    "global_layer": (output_norms.global_layer, 1e-5),
}
OUTPUT_NORMS = ("none", *_OUTPUT_NORMS)
DTYPES = ("float32", "bfloat16")

_INIT_STD = 0.02
_QK_NORM_EPS = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A decoder. The defaults are GPT-2's; 0 stands for what the comment says.

    Raises:
      TypeError: a field of another type, by name.
      ValueError: a field that is out of range or contradicts another, by name.

    >>> from attnorm.models.gpt import GPTConfig
    >>> GPTConfig(vocab_size=256, max_length=128, num_layers=2, num_heads=3, features=64)
    Traceback (most recent call last):
    ...
    ValueError: features must be a multiple of num_heads = 3 where head_dim is 0, got 64
    """

    vocab_size: int
    max_length: int  # of a text; with learned positions also the number of these
    num_layers: int
    num_heads: int
    features: int
    num_key_value_heads: int = 0  # num_heads; fewer are shared by groups of query heads
    head_dim: int = 0  # features / num_heads

    norm: str = "layer"
    norm_eps: float = 1e-5
    use_bias: bool = True  # in linear maps and LayerNorm
    mlp: str = "gelu"
    mlp_features: int = 0  # 4 features; for swiglu 8/3 features, up to the next multiple of 8

    position: str = "learned"
    rope_base: float = 10000.0
    rope_fraction: float = 1.0  # of each head's features that turn
    rope_scaling: str = "none"
    rope_factor: float = 1.0  # by how much the length grows
    rope_original_length: int = 0  # max_length

    qk_norm: bool = False  # RMSNorm without gain of each query and key, before rotation
    attention_scale: float = 0.0  # head_dim^-0.5
    attention_soft_cap: float = 0.0  # none; otherwise c of c tanh(logits / c)
    output_norm: str = "none"  # of each head's output, or of all; without gain, before gate and projection
    output_norm_eps: float = 0.0  # 1e-5 for LayerNorm, 1e-6 for RMSNorm
    head_gate: bool = False  # each head's output times a sigmoid of the layer's input

    tie_embeddings: bool = True  # the output layer is the token embedding
    logits_soft_cap: float = 0.0  # none

    dtype: str = "float32"  # of activations; parameters, norms and logits are float32
    scan_layers: bool = True
    remat: str = "none"

    def __post_init__(self):
        require_types(self)
        for name in ("vocab_size", "max_length", "num_layers", "num_heads", "features"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "a whole number > 0")
        for name in (
            "num_key_value_heads", "head_dim", "mlp_features", "rope_original_length", "attention_scale",
            "attention_soft_cap", "output_norm_eps", "logits_soft_cap",
        ):  # fmt: skip
            value = getattr(self, name)
            _require(0 <= value < math.inf, name, value, "a finite number >= 0")
        for name, known in {
            "norm": NORMS, "mlp": MLPS, "position": POSITIONS, "rope_scaling": ROPE_SCALINGS,
            "output_norm": OUTPUT_NORMS, "dtype": DTYPES, "remat": tuple(REMAT_POLICIES),
        }.items():  # fmt: skip
            _require(getattr(self, name) in known, name, getattr(self, name), f"one of {', '.join(known)}")
        _require(
            self.head_dim != 0 or self.features % self.num_heads == 0,
            "features", self.features, f"a multiple of num_heads = {self.num_heads} where head_dim is 0",
        )  # fmt: skip
        _require(
            self.num_heads % self.kv_heads == 0,
            "num_key_value_heads", self.num_key_value_heads, f"a divisor of num_heads = {self.num_heads}",
        )  # fmt: skip
        _require(0 < self.norm_eps < 1, "norm_eps", self.norm_eps, "a number in (0, 1)")
        _require(1 < self.rope_base < math.inf, "rope_base", self.rope_base, "a finite number > 1")
        _require(1 <= self.rope_factor < math.inf, "rope_factor", self.rope_factor, "a finite number >= 1")
        rotated = self.rotated_features
        is_whole = math.isclose(rotated, self.rope_fraction * self.head_size)
        _require(
            self.position != "rope" or (0 < rotated <= self.head_size and rotated % 2 == 0 and is_whole),
            "rope_fraction", self.rope_fraction,
            f"in (0, 1], and {self.head_size} features times it an even whole number",
        )  # fmt: skip
        _require(
            self.position == "rope" or self.rope_scaling == "none",
            "rope_scaling", self.rope_scaling, f"none with position = {self.position}",
        )  # fmt: skip
        _require(
            self.rope_scaling != "none" or self.rope_factor == 1,
            "rope_factor", self.rope_factor, "1 where rope_scaling is none",
        )  # fmt: skip

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.features // self.num_heads

    @property
    def rotated_features(self) -> int:
        """Of a head, by rotary positions."""
        return round(self.rope_fraction * self.head_size)

    @property
    def hidden_features(self) -> int:
        """Of the MLP."""
        if self.mlp_features:
            return self.mlp_features
        return 8 * -(-self.features // 3) if self.mlp == "swiglu" else 4 * self.features


class SelfAttention(nnx.Module):
    """Queries, keys and values of x, attention by the caller's function, and what follows it."""

    def __init__(self, config: GPTConfig, learned: Mapping[str, float], *, rngs: nnx.Rngs):
        self.config = config
        width = config.num_heads * config.head_size
        kv_width = config.kv_heads * config.head_size
        self.query = _linear(config, config.features, width, rngs)
        self.key = _linear(config, config.features, kv_width, rngs)
        self.value = _linear(config, config.features, kv_width, rngs)
        self.gate = _linear(config, config.features, config.num_heads, rngs) if config.head_gate else None
        self.project = _linear(config, width, config.features, rngs, is_residual=True)
        self.learned = nnx.Dict(
            {name: nnx.Param(jnp.full(config.num_heads, start)) for name, start in learned.items()}
        )

    def __call__(
        self, x: Float[Array, "B T D"], attention_fn: AttentionFn, positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        config = self.config
        query, key, value = (
            linear(x).reshape(*x.shape[:2], -1, config.head_size)
            for linear in (self.query, self.key, self.value)
        )
        if config.qk_norm:
            query, key = _rms_norm(query), _rms_norm(key)
        scale = config.attention_scale or config.head_size**-0.5
        if config.position == "rope":
            query, key = self._rotated(query, positions), self._rotated(key, positions)
            if config.rope_scaling == "yarn":
                scale *= yarn_logit_factor(config.rope_factor)
        elif config.position == "alibi":
            query, key = with_alibi(query, key, positions, scale)
        learned = {"learned": {name: x[...] for name, x in self.learned.items()}} if self.learned else {}
        out_BxTxNxH = attention_fn(
            query, key, value, scale=scale, logits_soft_cap=config.attention_soft_cap or None, **learned
        )
        if config.output_norm != "none":
            norm, eps = _OUTPUT_NORMS[config.output_norm]
            out_BxTxNxH = norm(out_BxTxNxH, eps=config.output_norm_eps or eps)
        if self.gate is not None:
            out_BxTxNxH = output_norms.gated(out_BxTxNxH, self.gate(x)[..., None])
        return self.project(out_BxTxNxH.reshape(*x.shape[:2], -1))

    def _rotated(self, x, positions):
        config = self.config
        frequencies = rope_frequencies(
            config.rotated_features,
            base=config.rope_base,
            scaling=config.rope_scaling,
            factor=config.rope_factor,
            original_length=config.rope_original_length or config.max_length,
        )
        return rotate(x, positions, frequencies)


class MLP(nnx.Module):
    """``W_out f(W_in x)``; for swiglu f is ``silu(W_gate x)`` times ``W_in x`` (arXiv 2002.05202)."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        self.kind = config.mlp
        hidden = config.hidden_features
        self.enter = _linear(config, config.features, hidden, rngs)
        self.gate = _linear(config, config.features, hidden, rngs) if config.mlp == "swiglu" else None
        self.leave = _linear(config, hidden, config.features, rngs, is_residual=True)

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        hidden = split_over_mesh(self.enter(x), inside_layer=True)
        if self.kind == "gelu":
            hidden = jax.nn.gelu(hidden, approximate=True)
        elif self.kind == "relu2":  # arXiv 2109.08668
            hidden = jnp.square(jax.nn.relu(hidden))
        elif self.gate is not None:  # swiglu
            hidden = jax.nn.silu(split_over_mesh(self.gate(x), inside_layer=True)) * hidden
        return self.leave(hidden)


class Block(nnx.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, config: GPTConfig, learned: Mapping[str, float], *, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, rngs)
        self.attention = SelfAttention(config, learned, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], attention_fn: AttentionFn, positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        x = split_over_mesh(x + self.attention(self.attention_norm(x), attention_fn, positions))
        return split_over_mesh(x + self.mlp(self.mlp_norm(x)))


class GPT(nnx.Module):
    """Predicts the next token at each position.

    Args:
      config: everything but the attention function.
      learned: numbers that every head of every layer learns for its attention function, such as those of a
        normaliser's parameters (:class:`attnorm.normalizers.learned.Learned`), by name, and where they start.
      rngs: with a "params" stream.

    >>> import functools, jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> import attnorm
    >>> from attnorm.models.gpt import GPT, GPTConfig
    >>> config = GPTConfig(vocab_size=256, max_length=32, num_layers=2, num_heads=2, features=16, position="rope")
    >>> model = GPT(config, rngs=nnx.Rngs(0))
    >>> attention_fn = functools.partial(attnorm.dot_product_attention, normalizer="l2", is_causal=True)
    >>> model(jnp.zeros((3, 5), int), attention_fn).shape
    (3, 5, 256)
    """

    def __init__(
        self, config: GPTConfig, *, learned: Mapping[str, float] = MappingProxyType({}), rngs: nnx.Rngs
    ):
        self.config = config
        init = nnx.initializers.normal(_INIT_STD)
        embed = functools.partial(
            nnx.Embed, features=config.features, embedding_init=init, dtype=config.dtype, rngs=rngs
        )
        self.token_embedding = embed(config.vocab_size)
        self.position_embedding = embed(config.max_length) if config.position == "learned" else None
        self.blocks = make_stack(lambda rngs: Block(config, learned, rngs=rngs), config.num_layers, rngs)
        self.norm = _norm(config, rngs)
        self.head = (
            None
            if config.tie_embeddings
            else nnx.Param(init(rngs.params(), (config.vocab_size, config.features)))
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        attention_fn: AttentionFn,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T V"]:
        """The logits of the token after each position.

        Args:
          tokens: ids.
          attention_fn: called as ``attention_fn(query, key, value, scale=..., logits_soft_cap=...)``; it must be
            causal, and where several documents share a row, keep them apart. With ``position="alibi"`` queries and
            keys have four features more than values. Where there are learned numbers, it gets them as ``learned``,
            a mapping from names to arrays (N,).
          positions: of each token in its document; by default 0, 1, ...

        Raises:
          ValueError: more tokens than learned positions.
        """
        return self.logits(self.hidden(tokens, attention_fn, positions))

    def hidden(
        self,
        tokens: Int[Array, "B T"],
        attention_fn: AttentionFn,
        positions: Int[Array, "B T"] | None = None,
    ) -> Float[Array, "B T D"]:
        """What :meth:`logits` maps to logits; apart, so that a loss can take the many logits in parts."""
        positions = self.positions_of(tokens) if positions is None else positions
        x = run_stack(
            self.blocks,
            lambda block, x: block(x, attention_fn, positions),
            self.embed(tokens, positions),
            scan=self.config.scan_layers,
            remat=self.config.remat,
        )
        return self.norm(x)

    def positions_of(self, tokens: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """0, 1, ... in every row."""
        length = tokens.shape[1]
        if self.position_embedding is not None and length > self.config.max_length:
            raise ValueError(
                f"tokens must have at most max_length = {self.config.max_length} positions, got {length}"
            )
        return jnp.broadcast_to(jnp.arange(length), tokens.shape)

    def embed(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The input of the first block."""
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        return split_over_mesh(x)

    def logits(self, hidden: Float[Array, "B T D"]) -> Float[Array, "B T V"]:
        table = self.token_embedding.embedding if self.head is None else self.head
        logits = jnp.einsum(
            "BTD,VD->BTV", hidden, table[...].astype(hidden.dtype), preferred_element_type=jnp.float32
        )
        cap = self.config.logits_soft_cap
        return cap * jnp.tanh(logits / cap) if cap else logits

    def make_cache(self, batch_size: int, num_slots: int, *, window: int | None = None) -> Cache:
        """An empty cache for :meth:`decode`: of that many tokens a row, or with a window of any number.

        Arguments and errors are those of :func:`attnorm.make_cache`; no row can have more tokens than there are
        learned positions.
        """
        max_length = self.config.max_length if self.position_embedding is not None else None
        if window is None and max_length is not None:
            if num_slots > max_length:
                raise ValueError(f"num_slots must be at most max_length = {max_length}, got {num_slots}")
            max_length = num_slots
        return make_cache(
            batch_size=batch_size,
            num_slots=num_slots,
            window=window,
            max_length=max_length,
            **self._cache_sizes,
        )

    @property
    def _cache_sizes(self):
        config = self.config
        return dict(
            num_layers=config.num_layers,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_size + (ALIBI_FEATURES if config.position == "alibi" else 0),
            value_head_dim=config.head_size,
            dtype=config.dtype,
        )

    def decode(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        attention_fn: AttentionFn,
        num_tokens: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B T V"], Cache]:
        """The logits after each of these tokens, which continue the rows of a cache, and the cache with them.

        Args:
          tokens: ids, as many at a time as one likes: a prompt, a part of it, or one for each row.
          cache: of :meth:`make_cache`. Donate it where the call is compiled, else every step copies it.
          attention_fn: called as in :meth:`__call__`, with all slots as keys and values and with
            ``query_offset``, (B,), where the first token stands. A causal partial of
            :func:`attnorm.dot_product_attention` serves, or of :func:`attnorm.split_attention`; a cache with a
            window also gives ``window``, for :func:`attnorm.windowed_attention`.
          num_tokens: (B,), how many tokens of each row count; those after them are neither stored nor seen, and their
            logits mean nothing. By default all.

        Raises:
          TypeError: tokens or numbers that are not integers.
          ValueError: no tokens, as far as they are known one outside the vocabulary, more of them than the cache has
            room for as far as its lengths are known, or another shape than the cache's.

        >>> import functools, jax.numpy as jnp
        >>> from flax import nnx
        >>> import attnorm
        >>> from attnorm.models.gpt import GPT, GPTConfig
        >>> config = GPTConfig(vocab_size=64, max_length=8, num_layers=1, num_heads=2, features=16)
        >>> model, tokens = GPT(config, rngs=nnx.Rngs(0)), jnp.array([[3, 1, 4, 1, 5]])
        >>> attention_fn = functools.partial(attnorm.dot_product_attention, is_causal=True)
        >>> cache = model.make_cache(1, 8)
        >>> _, cache = model.decode(tokens[:, :4], cache, attention_fn)
        >>> logits, cache = model.decode(tokens[:, 4:], cache, attention_fn)
        >>> print(jnp.allclose(logits, model(tokens, attention_fn)[:, 4:], atol=1e-5), cache.lengths)
        True [5]
        """
        hidden, cache = self._decode_hidden(tokens, cache, attention_fn, num_tokens)
        return self.logits(hidden), cache

    def decode_last(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        attention_fn: AttentionFn,
        num_tokens: Int[Array, "B"] | None = None,
    ) -> tuple[Float[Array, "B V"], Cache]:
        """As :meth:`decode`, with the logits after the last token of each row alone; for :func:`attnorm.generate`."""
        hidden, cache = self._decode_hidden(tokens, cache, attention_fn, num_tokens)
        count = tokens.shape[1] if num_tokens is None else jnp.asarray(num_tokens)
        last_B = jnp.broadcast_to(jnp.maximum(count - 1, 0), tokens.shape[:1])
        hidden = jnp.take_along_axis(hidden, last_B[:, None, None], axis=1)
        return self.logits(hidden)[:, 0], cache

    def _decode_hidden(self, tokens, cache, attention_fn, num_tokens):
        tokens, num_tokens = self._checked_for_decoding(tokens, cache, num_tokens)
        positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
        # Beyond the learned positions, which only traced lengths can be, an embedding would be NaN.
        bounded = (
            positions
            if self.position_embedding is None
            else jnp.minimum(positions, self.config.max_length - 1)
        )
        options = {"query_offset": cache.lengths}
        if cache.window is not None:
            options["window"] = cache.window

        def run(block, carry):
            x, cache, layer = carry

            def attend(query, key, value, **more):
                nonlocal cache
                cache = cache.append(layer, key, value, num_tokens)
                return attention_fn(query, cache.key[layer], cache.value[layer], **options, **more)

            x = block(x, attend, positions)
            return x, cache, layer + 1

        x, cache, _ = run_stack(
            self.blocks,
            run,
            (self.embed(tokens, bounded), cache, 0),
            scan=self.config.scan_layers,
            remat="none",
        )
        return self.norm(x), cache.advance(tokens.shape[1] if num_tokens is None else num_tokens)

    def _checked_for_decoding(self, tokens, cache, num_tokens):
        num_layers, B, _, num_heads, head_dim = cache.key.shape
        sizes = dict(
            num_layers=num_layers,
            num_key_value_heads=num_heads,
            head_dim=head_dim,
            value_head_dim=cache.value.shape[-1],
            dtype=str(cache.key.dtype),
        )
        if sizes != self._cache_sizes:
            raise ValueError(f"cache must have this model's sizes {self._cache_sizes}, got {sizes}")
        tokens = jnp.asarray(tokens)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens must hold integers, got {tokens.dtype}")
        if tokens.ndim != 2 or tokens.shape[0] != B or tokens.shape[1] == 0:
            raise ValueError(
                f"tokens must have shape (B, T), with the cache's B = {B} and T > 0, got {tokens.shape}"
            )
        T = tokens.shape[1]
        if num_tokens is not None:
            num_tokens = checked_counts("num_tokens", num_tokens, B, 0, T)
        check_vocabulary(
            "tokens", tokens, np.full(B, T) if num_tokens is None else num_tokens, self.config.vocab_size
        )
        cache.check_room(T if num_tokens is None else num_tokens, T)
        return tokens, num_tokens


def _rms_norm(x: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + _QK_NORM_EPS)).astype(x.dtype)


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.Module:
    options: dict[str, Any] = dict(epsilon=config.norm_eps, dtype=config.dtype, rngs=rngs)
    if config.norm == "rms":
        return nnx.RMSNorm(config.features, **options)
    # Trained models have features that are far from 0, where the fast variance cancels.
    return nnx.LayerNorm(config.features, use_bias=config.use_bias, use_fast_variance=False, **options)


def _linear(config: GPTConfig, inputs: int, outputs: int, rngs: nnx.Rngs, is_residual: bool = False):
    # GPT-2's: the sum of 2 num_layers such maps has the variance of one of the others.
    std = _INIT_STD / math.sqrt(2 * config.num_layers) if is_residual else _INIT_STD
    init = nnx.initializers.normal(std)
    return nnx.Linear(
        inputs, outputs, use_bias=config.use_bias, kernel_init=init, dtype=config.dtype, rngs=rngs
    )


def _require(condition: bool, name: str, got: object, wanted: str) -> None:
    if not condition:
        raise ValueError(f"{name} must be {wanted}, got {got!r}")
