"""Softmax sharpened where its entropy is large."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.rule import Normalizer

# The published fit of the inverse temperature to the entropy, highest power first.
_FIT = (-0.037, 0.481, -2.3, 4.917, -1.791)
_LEAST_ENTROPY = 0.5


@dataclass(frozen=True)
class AdaptiveTemperature(Normalizer):
    """The rule of :func:`adaptive_temperature`."""

    needs = frozenset({"rows"})
    passes = 2

    def row_weights(self, s, visible, place, axis):
        weights, log_weights = _softmax(s, visible, axis)
        entropy = -jnp.sum(weights * log_weights, axis, keepdims=True)
        fit = jnp.polyval(jnp.asarray(_FIT, s.dtype), entropy)
        beta = jnp.where(entropy > _LEAST_ENTROPY, jnp.maximum(fit, 1), 1)
        return _softmax(beta * s, visible, axis)[0]


def _softmax(s, visible, axis):
    """Weights, and their logarithms where they count."""
    s = jnp.where(visible, s, 0)
    m = jnp.max(jnp.where(visible, s, -jnp.inf), axis, keepdims=True, initial=jnp.finfo(s.dtype).min)
    total = jnp.sum(jnp.where(visible, jnp.exp(jnp.where(visible, s - m, 0)), 0), axis, keepdims=True)
    log_weights = jnp.where(visible, s - m - jnp.log(jnp.where(total == 0, 1, total)), 0)
    return jnp.where(visible, jnp.exp(log_weights), 0), log_weights


def adaptive_temperature(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Softmax with a temperature of its own for each row, by its entropy.

    ``softmax(s max(1, -.037 H⁴ + .481 H³ - 2.3 H² + 4.917 H - 1.791)) where H > 0.5, else softmax(s)``,
    H the Shannon entropy of softmax(s), and the polynomial as it was published: for inference; the gradient here goes
    through H too. The polynomial falls below 1 for entropies above about 6, that is for rows spread over more than 400
    keys, where it changes nothing. The entropy is known only after a first pass, so no kernel serves it.

    Args:
      logits: floating point, any shape.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype; they sum to 1. They have no log-norm.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: a shape that does not broadcast.

    Source: arXiv 2410.01104.

    >>> import jax.numpy as jnp
    >>> from attnorm import adaptive_temperature, softmax
    >>> logits = jnp.array([0.0, 1.0, 2.0])
    >>> bool(adaptive_temperature(logits)[2] > softmax(logits)[2])
    True
    """
    return AdaptiveTemperature().weights(logits, axis=axis, where=where)
