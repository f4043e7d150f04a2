"""Text, token by token, from any model that decodes with a cache."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from attnorm.cache import Cache, check_vocabulary, checked_counts, is_known, require_whole

# decode(params, tokens, cache, num_tokens) -> (logits, cache): the logits (B, V) after the last of each row's
# num_tokens (B,) tokens (B, T), and the cache with them. Where num_tokens is 0 the logits mean nothing.
DecodeFn = Callable[
    [Any, Int[Array, "B T"], Cache, Int[Array, "B"]],
    tuple[Float[Array, "B V"], Cache],
]

# Longer prompts are taken in chunks of so many tokens, by one program.
_CHUNK = 256

# Positive numbers that float32 has.
_TINY, _HUGE = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class Generated(NamedTuple):
    """What :func:`generate` returns. Letters: B batch, M max_new_tokens.

    tokens: the new ones; after the end of a row, ``end`` again.
    lengths: how many of them each row has, ``end`` included.
    cache: of prompts and new tokens except the last of each row, which a further prompt begins with.
    """

    tokens: Int[Array, "B M"]
    lengths: Int[Array, "B"]
    cache: Cache


def generate(
    decode: DecodeFn,
    params: Any,
    cache: Cache,
    prompt: Int[Array, "B T"],
    *,
    max_new_tokens: int,
    prompt_lengths: Int[Array, "B"] | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    rng: Array | None = None,
    end: int | None = None,
) -> Generated:
    """Continues prompts, in one compiled program with one loop; the cache is donated to it.

    Compiled once for each ``decode`` (a function, by identity), shape of prompt and cache, ``max_new_tokens`` and
    ``top_k``. So keep the function, and pad prompts of many lengths to a few.

    Args:
      decode: the model, ``decode(params, tokens, cache, num_tokens) -> (logits, cache)``: the logits (B, V) after the
        last of each row's ``num_tokens`` (B,) tokens (B, T). :meth:`attnorm.models.gpt.GPT.decode_last` does that.
      params: its parameters, any pytree.
      cache: what it continues, empty or from an earlier call; not to be used again.
      prompt: at least one token for each row.
      max_new_tokens: how many tokens to add, at most.
      prompt_lengths: how many tokens of each row are prompt; those after them are padding. By default all.
      temperature: logits are divided by it before a token is drawn; 0 takes the most probable token.
      top_k: draw from that many most probable tokens; of equal ones, the first.
      top_p: draw from the fewest most probable tokens whose probabilities sum to at least that; of equal ones, the
        first.
      rng: a PRNG key, required where the temperature is positive.
      end: the token at which a row ends. All rows having ended, so does the loop.

    Raises:
      TypeError: an argument of another type; a ``decode`` that returns anything else.
      ValueError: an empty prompt, a token outside the vocabulary, more tokens than the cache has room for, or a
        number out of range, by name.

    >>> import jax, jax.numpy as jnp
    >>> import attnorm
    >>> def decode(params, tokens, cache, num_tokens):  # it counts, modulo 5
    ...     last = jnp.take_along_axis(tokens, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)
    ...     return jax.nn.one_hot((last[:, 0] + params) % 5, 5), cache.advance(num_tokens)
    >>> cache = attnorm.make_cache(num_layers=1, batch_size=2, num_slots=9, num_key_value_heads=1, head_dim=1)
    >>> out = attnorm.generate(decode, 1, cache, jnp.array([[4, 1], [3, 0]]), max_new_tokens=6,
    ...     prompt_lengths=jnp.array([2, 1]), end=0)
    >>> print(out.tokens, out.lengths, out.cache.lengths)
    [[2 3 4 0 0 0]
     [4 0 0 0 0 0]] [4 2] [5 2]
    """
    prompt, prompt_lengths = _checked_prompt(prompt, prompt_lengths, cache)
    require_whole("max_new_tokens", max_new_tokens, 1)
    sampling = _checked_sampling(temperature, top_k, top_p, rng)
    if end is not None:
        require_whole("end", end, 0)
    chunk = min(prompt.shape[1], cache.longest_chunk, _CHUNK)
    _check_room(cache, prompt_lengths, max_new_tokens)
    logits = _checked_logits(decode, params, cache, prompt.shape[0], chunk)
    V = logits.shape[-1]
    check_vocabulary("prompt", prompt, prompt_lengths, V)
    if end is not None and end >= V:
        raise ValueError(f"end must be from 0 to {V - 1}, of a vocabulary of {V}, got {end}")
    return _generate(
        params,
        cache,
        prompt,
        prompt_lengths,
        sampling,
        None if end is None else jnp.int32(end),
        decode=decode,
        logits=logits,
        max_new_tokens=int(max_new_tokens),
        chunk=chunk,
        top_k=top_k,
    )


class _Sampling(NamedTuple):
    """How a token is drawn."""

    temperature: Array
    top_p: Array | None
    rng: Array


@functools.partial(
    jax.jit, static_argnames=("decode", "logits", "max_new_tokens", "chunk", "top_k"), donate_argnames="cache"
)
def _generate(
    params, cache, prompt, prompt_lengths, sampling, end, *, decode, logits, max_new_tokens, chunk, top_k
) -> Generated:
    logits = jnp.zeros(logits.shape, logits.dtype)
    logits, cache = _prefill(decode, params, cache, prompt, prompt_lengths, logits, chunk)
    B = prompt.shape[0]

    def add(step, tokens, lengths, ended, logits):
        """The state with the token that these logits tell."""
        token = _next_token(logits, step, sampling, top_k)
        if end is not None:
            token = jnp.where(ended, end, token)
        tokens = tokens.at[:, step].set(token)
        lengths = lengths + ~ended
        return step + 1, tokens, lengths, ended if end is None else ended | (token == end)

    def is_running(state):
        (step, _, _, ended), _ = state
        return (step < max_new_tokens) & ~jnp.all(ended)

    def run(state):
        (step, tokens, lengths, ended), cache = state
        last = jax.lax.dynamic_slice_in_dim(tokens, step - 1, 1, axis=1)
        logits, cache = decode(params, last, cache, (~ended).astype(jnp.int32))
        return add(step, tokens, lengths, ended, logits), cache

    tokens = jnp.full((B, max_new_tokens), 0 if end is None else end, jnp.int32)
    first = add(jnp.int32(0), tokens, jnp.zeros(B, jnp.int32), jnp.zeros(B, bool), logits)
    (_, tokens, lengths, _), cache = jax.lax.while_loop(is_running, run, (first, cache))
    return Generated(tokens, lengths, cache)


def _prefill(decode, params, cache, prompt, prompt_lengths, logits, chunk):
    """The logits (B, V) after each prompt, and the cache with all prompts, which enter it chunk by chunk."""
    B, T = prompt.shape
    num_chunks = -(-T // chunk)
    prompt = jnp.pad(prompt, [(0, 0), (0, num_chunks * chunk - T)])
    chunks = jnp.moveaxis(prompt.reshape(B, num_chunks, chunk), 1, 0)
    starts = jnp.arange(num_chunks)[:, None] * chunk
    counts = jnp.clip(prompt_lengths - starts, 0, chunk)

    def step(state, tokens_and_counts):
        logits, cache = state
        tokens, count = tokens_and_counts
        more, cache = decode(params, tokens, cache, count)
        return (jnp.where(count[:, None] > 0, more, logits), cache), None

    return jax.lax.scan(step, (logits, cache), (chunks, counts))[0]


def _next_token(logits, step, sampling: _Sampling | None, top_k) -> Int[Array, "B"]:
    if sampling is None:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = logits.astype(jnp.float32)
    # From the largest on, so that no temperature makes it infinite.
    logits = (logits - jnp.max(logits, axis=-1, keepdims=True)) / sampling.temperature
    if top_k is not None:
        _, first = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))
        logits = _kept(logits, first, True)
    if sampling.top_p is not None:
        order = jnp.argsort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        logits = _kept(logits, order, before < sampling.top_p)
    return jax.random.categorical(jax.random.fold_in(sampling.rng, step), logits).astype(jnp.int32)


def _kept(logits, tokens, which):
    """The logits of those of the ``tokens`` (B, n), each at most once in a row, for which this holds; others are -inf."""
    rows = jnp.arange(logits.shape[0])[:, None]
    return jnp.where(jnp.zeros(logits.shape, bool).at[rows, tokens].set(which), logits, -jnp.inf)


# Checks.


def _checked_prompt(prompt, prompt_lengths, cache):
    if not isinstance(cache, Cache):
        raise TypeError(f"cache must be a Cache, as of make_cache, got {cache!r}")
    prompt = prompt if isinstance(prompt, jax.Array) else np.asarray(prompt)
    B = cache.lengths.shape[0]
    if prompt.ndim != 2 or prompt.shape[0] != B or prompt.shape[1] == 0:
        raise ValueError(
            f"prompt must have shape (B, T), with the cache's B = {B} and at least one token, got {prompt.shape}"
        )
    if not jnp.issubdtype(prompt.dtype, jnp.integer):
        raise TypeError(f"prompt must hold integers, got {prompt.dtype}")
    T = prompt.shape[1]
    lengths = np.full(B, T, np.int32) if prompt_lengths is None else prompt_lengths
    return jnp.asarray(prompt, jnp.int32), checked_counts("prompt_lengths", lengths, B, 1, T)


def _checked_sampling(temperature, top_k, top_p, rng) -> _Sampling | None:
    """None where the most probable token is taken."""
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, numbers.Real)):
            raise TypeError(f"{name} must be a number, got {value!r}")
    if temperature != 0 and not _TINY <= temperature <= _HUGE:
        raise ValueError(f"temperature must be 0, or from {_TINY:.3g} to {_HUGE:.3g}, got {temperature!r}")
    if top_k is not None:
        require_whole("top_k", top_k, 1)
    if top_p is not None and not _TINY <= top_p <= 1:
        raise ValueError(f"top_p must be from {_TINY:.3g} to 1, got {top_p!r}")
    if temperature == 0:
        if (top_k, top_p) != (None, None):
            raise ValueError("top_k and top_p draw tokens, which needs temperature > 0, got 0")
        return None
    if rng is None:
        raise ValueError(f"rng must be a PRNG key where temperature = {temperature} > 0, got None")
    return _Sampling(jnp.float32(temperature), None if top_p is None else jnp.float32(top_p), rng)


def _check_room(cache, prompt_lengths, max_new_tokens):
    if cache.max_length is None or not (is_known(cache.lengths) and is_known(prompt_lengths)):
        return
    lengths = np.asarray(cache.lengths), np.asarray(prompt_lengths)
    needed = sum(lengths) + max_new_tokens - 1  # the last token is not stored
    if needed.max() > cache.max_length:
        row = int(needed.argmax())
        raise ValueError(
            f"cache: rows may have max_length = {cache.max_length} tokens; row {row} has {lengths[0][row]}, its prompt "
            f"{lengths[1][row]}, and max_new_tokens is {max_new_tokens}, of which the last needs no room"
        )


@functools.partial(jax.jit, static_argnames="decode")
def _decode(params, tokens, cache, num_tokens, *, decode):
    return decode(params, tokens, cache, num_tokens)


def _checked_logits(decode, params, cache, B, chunk) -> jax.ShapeDtypeStruct:
    """The logits (B, V) that ``decode`` gives; a TypeError where it returns no (logits, cache) that fit."""
    tokens, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, chunk), (B,)))
    # Of a compiled function JAX remembers what it gives, and does not trace it again.
    made = jax.eval_shape(functools.partial(_decode, decode=decode), params, tokens, cache, counts)

    def shapes(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype), tree)

    is_pair = isinstance(made, tuple) and len(made) == 2 and shapes(made[1]) == shapes(cache)
    if not is_pair or getattr(made[0], "shape", ())[:-1] != (B,):
        raise TypeError(f"decode must return logits ({B}, V) and a cache like the one it got, got {made}")
    return jax.ShapeDtypeStruct(made[0].shape, made[0].dtype)
