"""How many tokens a second a small decoder generates with a cache, on the CPU and in one process.

The ways to hold the keys: ``whole``, all of them, read by the default attention; ``split``, the same, cut into parts
that are computed side by side; ``window``, the last few; ``none``, no cache but a pass over the whole text for each
token.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from attnorm import chunked
from attnorm.attention import dot_product_attention
from attnorm.bench import contenders, report
from attnorm.cache import Cache
from attnorm.decoding import split_attention, windowed_attention
from attnorm.models.gpt import GPT, GPTConfig
from attnorm.tiling import round_up

BASELINE = "softmax"
WAYS = ("whole", "split", "window", "none")
_NUM_PARTS = 8
_WINDOW = 256
_TOKENS = 8  # that are generated in one go
_MODEL: dict[str, Any] = dict(vocab_size=256, num_layers=4, num_heads=8, features=512, position="rope")


def run(
    normalizers: Sequence[str], lengths: Sequence[int], rounds: int, progress: Callable[[str], None]
) -> dict:
    """The report: by length, normaliser and way the tokens a second, their ratios to softmax and to the way ``whole``.

    Ratios are medians over rounds of the ratio within a round; every second round goes backwards.
    """
    settings = dict(
        model=_MODEL, batch_size=1, num_parts=_NUM_PARTS, window=_WINDOW, tokens=_TOKENS, rounds=rounds
    )
    result = report.new_report("measured decoding on cpu", **settings)
    result["results"] = []
    names = list(dict.fromkeys([BASELINE, *normalizers]))
    for length in lengths:
        runs = {}
        for name in names:
            for way in WAYS:
                if way == "split" and contenders.rule(name).needs - chunked.SERVES:
                    continue
                progress(f"L={length}: preparing {name}, {way}")
                runs[name, way] = _Run(name, way, length)
                runs[name, way]()
        progress(f"L={length}: {rounds} rounds")
        seconds = _seconds(runs, rounds)
        for (name, way), own in seconds.items():
            tokens = 1 if way == "none" else _TOKENS
            result["results"].append(
                {
                    "length": length,
                    "normalizer": name,
                    "cache": way,
                    "tokens_per_second": tokens / statistics.median(own),
                    "speed_over_softmax": _ratio(seconds[BASELINE, way], own),
                    "speed_over_whole": _ratio(seconds[name, "whole"], own, tokens / _TOKENS),
                }
            )
    return result


class _Run:
    """Generates after a text of ``length`` tokens, again from the same state at every call."""

    def __init__(self, name: str, way: str, length: int):
        model = GPT(GPTConfig(**_MODEL, max_length=length + _TOKENS), rngs=nnx.Rngs(0))
        graph, self._params = nnx.split(model)
        rule = contenders.rule(name)
        causal = functools.partial(dot_product_attention, normalizer=rule, is_causal=True)
        if way == "none":
            self._state: Array | Cache = jnp.zeros((1, length), jnp.int32)

            def step(params, tokens):
                model = nnx.merge(graph, params)
                logits = model.logits(model.hidden(tokens, causal)[:, -1:])
                return jnp.roll(tokens, -1, axis=1).at[:, -1].set(jnp.argmax(logits[:, 0], axis=-1))

        else:
            ways: dict[str, Callable[..., Array]] = {
                "whole": causal,
                "split": functools.partial(split_attention, normalizer=rule, num_parts=_NUM_PARTS),
                "window": functools.partial(windowed_attention, normalizer=rule),
            }
            attention_fn = ways[way]
            window = min(_WINDOW, length) if way == "window" else None
            slots = round_up(length + _TOKENS, _NUM_PARTS) if window is None else window + 1
            cache = model.make_cache(1, slots, window=window)
            key, value = (
                jax.random.normal(jax.random.key(seed), x.shape)
                for seed, x in enumerate((cache.key, cache.value))
            )
            self._state = dataclasses.replace(cache, key=key, value=value)

            def step(params, cache):
                cache = dataclasses.replace(cache, lengths=jnp.full(1, length, jnp.int32))
                model = nnx.merge(graph, params)

                def add(_, state):
                    token, cache = state
                    logits, cache = model.decode_last(token, cache, attention_fn)
                    return jnp.argmax(logits, axis=-1)[:, None].astype(jnp.int32), cache

                return jax.lax.fori_loop(0, _TOKENS, add, (jnp.zeros((1, 1), jnp.int32), cache))[1]

        self._step = jax.jit(step, donate_argnums=1)

    def __call__(self):
        self._state = jax.block_until_ready(self._step(self._params, self._state))


def _seconds(runs, rounds):
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in runs if number % 2 == 0 else reversed(runs):
            start = time.perf_counter()
            runs[name]()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _ratio(theirs, ours, tokens=1.0):
    """How many times as fast as the others, who make one token while these make ``tokens``."""
    return statistics.median(other / own for other, own in zip(theirs, ours, strict=True)) * tokens


def text(result: dict) -> str:
    """The report as tables."""
    tables = []
    for length in dict.fromkeys(case["length"] for case in result["results"]):
        rows = [["", "cache", "tokens/s", "÷ softmax", "÷ whole"]]
        for case in result["results"]:
            if case["length"] == length:
                numbers = case["tokens_per_second"], case["speed_over_softmax"], case["speed_over_whole"]
                cells = (f"{number:.{digits}f}" for number, digits in zip(numbers, (1, 2, 3), strict=True))
                rows.append([case["normalizer"], case["cache"], *cells])
        tables.append(report.table(f"\nAfter {length} tokens, float32, one text at a time", rows))
    return "\n".join(tables)
