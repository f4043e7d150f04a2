"""Weights that no row of logits determines alone: dense functions of all logits of a query's heads or history.

They have no rule, so :func:`attnorm.dot_product_attention` does not serve them: a tile of keys, or even a row, is
not enough. Multiply the weights with the values.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.lp import Lp
from attnorm.normalizers.rule import broadcasts_to, checked_floating, checked_where


def selective(
    logits: Float[Array, "*B N T T"], *, where: Bool[Array, "*#B #N T T"] | None = None
) -> Float[Array, "*B N T T"]:
    """Selective attention: ``softmax(s - F)``, ``F_ij = Σ_{j < k < i} relu(s⁰_kj)`` with the logits s⁰ of head 0.

    Each query may vote, by its first head's logits, that a key be seen less by all heads of later queries. No query
    votes against itself, and none against the first key. Causal.

    Args:
      logits: floating point, scaled, for queries and keys at the same T positions.
      where: boolean, broadcasts to the logits; other keys, and keys after the query, are as if removed, and cast no
        votes.

    Returns:
      The weights, in the logits' shape and dtype.

    Raises:
      TypeError: logits that are not floating point.
      ValueError: logits that are not square in their last two axes, or that have no axis of heads.

    Source: arXiv 2410.02703, as code that follows it has it, the shift by one query (k < i) included.

    >>> import jax.numpy as jnp
    >>> from attnorm.normalizers.matrix import selective
    >>> logits = jnp.zeros((1, 3, 3)).at[0, 1, 0].set(9.0)
    >>> [round(float(x), 3) for x in selective(logits)[0, 2]]  # nobody votes against the first key
    [0.333, 0.333, 0.333]
    """
    logits = checked_floating("logits", logits)
    if logits.ndim < 3 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits must have shape (..., N, T, T), got {logits.shape}")
    length = logits.shape[-1]
    seen = jnp.tri(length, dtype=bool)
    if where is not None:
        seen = seen & checked_where(where, logits.shape)
    s = jnp.where(seen, logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), 0)
    query, key = jnp.arange(length)[:, None], jnp.arange(length)
    votes = jnp.where((key > 0) & (key < query), jax.nn.relu(s[..., :1, :, :]), 0)
    before = jnp.cumsum(votes, axis=-2) - votes
    return Lp(1.0).weights(s - before, where=jnp.broadcast_to(seen, s.shape)).astype(logits.dtype)


def sinkhorn(
    logits: Float[Array, "... T T"], *, iterations: int = 3, where: Bool[Array, "*#B T T"] | None = None
) -> Float[Array, "... T T"]:
    """Sinkhorn's weights: ``exp(s)`` with rows and columns divided by their sums in turn, rows first.

    After one iteration this is softmax; after many, rows and columns both sum to 1. Not causal, whatever is hidden:
    the sum of a column knows all queries.

    Args:
      logits: floating point, as many keys as queries.
      iterations: odd, so that rows sum to 1 in the end.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype.

    Raises:
      TypeError: logits that are not floating point.
      ValueError: logits that are not square in their last two axes, iterations that are even or not positive.

    Source: arXiv 2110.11773; its code (github.com/michaelsdr/sinkformers) takes the same turns, rows first, with 1 over
    the number of queries and keys as their sums.

    >>> import jax.numpy as jnp
    >>> from attnorm.normalizers.matrix import sinkhorn
    >>> logits = jnp.array([[1.0, 0.0], [2.0, 0.0]])
    >>> [round(float(x), 2) for x in jnp.sum(sinkhorn(logits, iterations=51), axis=0)]
    [1.0, 1.0]
    """
    logits = checked_floating("logits", logits)
    if logits.ndim < 2 or logits.shape[-1] != logits.shape[-2]:
        raise ValueError(f"logits must have shape (..., T, T), got {logits.shape}")
    if iterations < 1 or iterations % 2 == 0:
        raise ValueError(f"iterations must be odd and positive, got {iterations!r}")
    seen = logits != -jnp.inf
    if where is not None:
        seen = seen & checked_where(where, logits.shape)
    s = jnp.where(seen, logits, 0).astype(jnp.promote_types(logits.dtype, jnp.float32))
    for number in range(iterations):
        s = s - _log_sum(s, seen, axis=-1 if number % 2 == 0 else -2)
    return jnp.where(seen, jnp.exp(s), 0).astype(logits.dtype)


def _log_sum(s, seen, axis):
    """Of what is seen; 0 where nothing is."""
    hidden = jnp.where(seen, s, -1e30)
    some = jnp.any(seen, axis, keepdims=True)
    return jnp.where(some, jax.nn.logsumexp(jnp.where(some, hidden, 0), axis, keepdims=True), 0)


def differential(
    logits: Float[Array, "..."],
    other: Float[Array, "..."],
    *,
    lam: float | Array,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Differential attention: ``softmax(s) - λ softmax(s')``, of the logits of two halves of a head. Signed.

    The published layer multiplies the values by this, then each head's output by
    :func:`attnorm.output_norms.head_rms` and by ``1 - λ_init``.

    Args:
      logits, other: s and s', floating point, of one shape.
      lam: λ, a number or an array that broadcasts to the logits: :func:`differential_lambda`.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype; they sum to 1 - λ.

    Raises:
      TypeError: logits that are not floating point.
      ValueError: logits of different shapes, a λ that does not broadcast to them.

    Source: arXiv 2410.05258 and its code, in github.com/microsoft/unilm.

    >>> import jax.numpy as jnp
    >>> from attnorm.normalizers.matrix import differential
    >>> [round(float(x), 3) for x in differential(jnp.array([2.0, 0.0]), jnp.zeros(2), lam=0.5)]
    [0.631, -0.131]
    """
    logits, other = checked_floating("logits", logits), checked_floating("other", other)
    if logits.shape != other.shape:
        raise ValueError(f"other must have the logits' shape {logits.shape}, got {other.shape}")
    if not broadcasts_to(jnp.shape(lam), logits.shape):
        raise ValueError(f"lam must broadcast to logits {logits.shape}, got shape {jnp.shape(lam)}")
    wide = jnp.promote_types(logits.dtype, jnp.float32)
    first, second = (Lp(1.0).weights(x.astype(wide), axis=axis, where=where) for x in (logits, other))
    return (first - lam * second).astype(logits.dtype)


def differential_lambda(
    query: Float[Array, "2 H"], key: Float[Array, "2 H"], *, init: float
) -> Float[Array, ""]:
    """``λ = exp(<q1, k1>) - exp(<q2, k2>) + λ_init``, of four learned vectors, published from normal(0, 0.1).

    >>> import jax.numpy as jnp
    >>> from attnorm.normalizers.matrix import differential_init, differential_lambda
    >>> print(differential_lambda(jnp.zeros((2, 4)), jnp.zeros((2, 4)), init=differential_init(0)))
    0.2
    """
    first, second = jnp.exp(jnp.sum(query * key, axis=-1))
    return first - second + init


def differential_init(layer: int) -> float:
    """``λ_init = 0.8 - 0.6 exp(-0.3 l)`` of layer l = 0, 1, ..."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)
