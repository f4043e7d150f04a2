"""Identities of attention weights.

Notation: logits ``s``, ``a = softmax(s)``, ``y = lp(s, p=p)`` with ``Σ y^p = 1``. Every function reduces one
axis of keys and maps over the others. A row without visible keys has weights 0; its entropies, effective
number of keys and factor are 0.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from attnorm.theory._checks import check_p


def entropy(probabilities: Float[Array, "..."], *, axis: int = -1) -> Float[Array, "..."]:
    """Shannon entropy ``-Σ a_j log a_j`` in nats, between 0 and log S.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import entropy
    >>> print(round(float(entropy(jnp.full(8, 1 / 8))), 4))  # log 8
    2.0794
    """
    positive = probabilities > 0
    log = jnp.log(jnp.where(positive, probabilities, 1))
    return -jnp.sum(jnp.where(positive, probabilities * log, 0), axis=axis)


def renyi_entropy(probabilities: Float[Array, "..."], order: float, *, axis: int = -1) -> Float[Array, "..."]:
    """Rényi entropy ``log(Σ a_j^order) / (1 - order)`` in nats; it falls as the order grows.

    Order 0 counts the keys with positive weight, order 1 is Shannon's entropy, order 2 is the log of
    :func:`effective_keys`, order ``math.inf`` is ``-log max a``.

    Raises:
      ValueError: order < 0 or NaN.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import renyi_entropy
    >>> a = jnp.array([0.5, 0.25, 0.25])
    >>> print([round(float(renyi_entropy(a, order)), 4) for order in (0, 1, 2, float("inf"))])
    [1.0986, 1.0397, 0.9808, 0.6931]
    """
    if not order >= 0:
        raise ValueError(f"order must be at least 0, got {order}")
    if order == 1:
        return entropy(probabilities, axis=axis)
    positive = probabilities > 0
    if order == math.inf:
        largest = jnp.max(probabilities, axis=axis)
        return -jnp.log(jnp.where(largest > 0, largest, 1))
    # Powers of the ratio to the largest weight do not underflow, whatever the order.
    largest = jnp.max(probabilities, axis=axis, keepdims=True)
    log = jnp.log(jnp.where(positive, probabilities, 1))
    log_largest = jnp.log(jnp.where(largest > 0, largest, 1))
    total = jnp.sum(jnp.where(positive, jnp.exp(order * (log - log_largest)), 0), axis=axis)
    log_total = jnp.log(jnp.where(total > 0, total, 1)) + order * jnp.squeeze(log_largest, axis)
    return log_total / (1 - order)


def effective_keys(weights: Float[Array, "..."], *, axis: int = -1) -> Float[Array, "..."]:
    """Effective number of keys ``N_eff = (Σ y_j)² / Σ y_j²``: 1 for one-hot, S for uniform weights.

    Independent of how the weights are normalised; ``1 / Σ a²`` for softmax, ``(Σ y)²`` for L2.

    >>> import jax.numpy as jnp
    >>> from attnorm import l2, softmax
    >>> from attnorm.theory import effective_keys
    >>> s = jnp.array([0.0, 1.0, 2.0, 3.0])
    >>> print(round(float(effective_keys(softmax(s))), 4), round(float(effective_keys(l2(s))), 4))
    2.0861 2.0861
    """
    total = jnp.sum(weights, axis=axis)
    energy = jnp.sum(weights**2, axis=axis)
    return jnp.where(energy > 0, total**2 / jnp.where(energy > 0, energy, 1), 0)


def lp_from_softmax_factor(
    probabilities: Float[Array, "..."], p: float, *, axis: int = -1
) -> Float[Array, "..."]:
    """The positive scalar c of a row with ``lp(s, p) = c · softmax(s)``: ``c = ‖a‖_p^-1``.

    Equal to ``exp((1 - 1/p) H_p(a))`` with H_p the :func:`renyi_entropy`; ``sqrt(N_eff)`` for p = 2. So an
    L_p attention output has the direction of the softmax output, and a norm over the head removes the
    difference.

    Raises:
      ValueError: p <= 0 or NaN.

    >>> import jax.numpy as jnp
    >>> from attnorm import l2, softmax
    >>> from attnorm.theory import lp_from_softmax_factor
    >>> s = jnp.array([0.0, 1.0, 2.0])
    >>> c = lp_from_softmax_factor(softmax(s), 2)
    >>> bool(jnp.allclose(c * softmax(s), l2(s)))
    True
    """
    check_p(p)
    largest = jnp.max(probabilities, axis=axis, keepdims=True)
    visible = largest > 0
    largest = jnp.where(visible, largest, 1)
    norm = 1 if p == math.inf else jnp.sum((probabilities / largest) ** p, axis=axis) ** (1 / p)
    factor = 1 / (jnp.squeeze(largest, axis) * norm)
    return jnp.where(jnp.squeeze(visible, axis), factor, 0)
