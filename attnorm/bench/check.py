"""Compares what a contender computed with attention in float64, for the last head of the last batch."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np

from attnorm.attention import dot_product_attention
from attnorm.bench.contenders import DEVICES, Case, rule

# The largest error admitted, over the largest value. Accelerators round the factors of float32 products.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}
TOLERANCE_OF_ACCELERATORS = {"float32": 1e-2, "bfloat16": 3e-2}
_RESULTS = ("output", "gradient of query", "gradient of key", "gradient of value")
_ROWS = 512


class WrongResult(Exception):
    """A contender did not compute what it should."""


def errors(path: Path, case: Case, normalizer: str) -> dict[str, float]:
    """The error of each saved result, over the result's largest value.

    Raises:
      WrongResult: an error is above the tolerance, or a result is not finite.
    """
    with np.load(path) as saved:
        results = [saved[f"arr_{i}"] for i in range(len(saved.files))]
    tolerance = TOLERANCE if DEVICES[case.device].platform == "cpu" else TOLERANCE_OF_ACCELERATORS
    found = {}
    for name, result, expected in zip(_RESULTS, results, reference(case, normalizer), strict=False):
        error = float(np.max(np.abs(result - expected)) / np.max(np.abs(expected)))
        if not error <= tolerance[case.dtype]:
            wanted = f"at most {tolerance[case.dtype]:g} of its largest value"
            raise WrongResult(f"wrong {name}: differs from float64 by {error:.2g}, {wanted}")
        found[name] = error
    return found


@functools.lru_cache(maxsize=2)  # what a case compares with: ours, and softmax of the peers
def reference(case: Case, normalizer: str) -> list[np.ndarray]:
    """Output, and gradients of query, key and value, L×H, by dense attention in float64 over parts of the rows."""
    import jax
    import jax.numpy as jnp

    inputs = [np.asarray(jnp.asarray(x[-1, :, -1], case.dtype), np.float64) for x in case.inputs()]
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        query, key, value, cotangent = (jnp.asarray(x)[None, :, None] for x in inputs)

        def attend(start, query, key, value):
            return dot_product_attention(
                query,
                key,
                value,
                normalizer=rule(normalizer),
                is_causal=True,
                query_offset=start,
                implementation="reference",
            )

        @jax.jit
        def part(query, cotangent, start):
            output, pullback = jax.vjp(functools.partial(attend, start), query, key, value)
            return output, *pullback(cotangent)

        parts = []
        for start in range(0, case.length, _ROWS):
            rows = slice(start, start + _ROWS)
            parts.append(part(query[:, rows], cotangent[:, rows], start))
        output, d_query, d_key, d_value = zip(*parts, strict=True)
        results = [jnp.concatenate(output, 1), jnp.concatenate(d_query, 1), sum(d_key), sum(d_value)]
        return [np.asarray(x[0, :, 0]) for x in results]
