"""Identities and bounds of attention weights, as functions.

Notation: logits ``s``, ``a = softmax(s)``, ``y = lp(s, p=p)`` with ``Σ y^p = 1``, ``J = ∂y/∂s``. Every function
reduces one axis of keys and maps over the others. A row without visible keys has weights 0; its entropies,
effective number of keys, factor and Jacobian norms are 0.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float


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

    Equal to ``exp((1 - 1/p) H_p(a))`` with H_p the :func:`renyi_entropy`; ``sqrt(N_eff)`` for p = 2. So an L_p
    attention output has the direction of the softmax output, and a norm over the head removes the difference.

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
    _check_p(p)
    largest = jnp.max(probabilities, axis=axis, keepdims=True)
    visible = largest > 0
    largest = jnp.where(visible, largest, 1)
    norm = 1 if p == math.inf else jnp.sum((probabilities / largest) ** p, axis=axis) ** (1 / p)
    factor = 1 / (jnp.squeeze(largest, axis) * norm)
    return jnp.where(jnp.squeeze(visible, axis), factor, 0)


def jacobian(weights: Float[Array, "... S"], p: float) -> Float[Array, "... S S"]:
    """Jacobian ``J = diag(y) - y (y^p)ᵀ`` of L_p weights to their logits, ``J_ij = ∂y_i / ∂s_j``.

    Args:
      weights: L_p weights, keys last.
      p: the norm they were normalised with, finite: p = ∞ has a derivative only where the maximum is unique.

    Raises:
      ValueError: p <= 0, infinite or NaN.

    >>> import jax.numpy as jnp
    >>> from attnorm import softmax
    >>> from attnorm.theory import jacobian
    >>> print(jacobian(softmax(jnp.zeros(2)), 1))
    [[ 0.25 -0.25]
     [-0.25  0.25]]
    """
    _check_finite_p(p)
    diagonal = weights[..., :, None] * jnp.eye(weights.shape[-1], dtype=weights.dtype)
    return diagonal - weights[..., :, None] * weights[..., None, :] ** p


def jacobian_frobenius_norm(weights: Float[Array, "... S"], p: float) -> Float[Array, "..."]:
    """Frobenius norm of :func:`jacobian` in O(S): ``‖J‖_F² = s_2 (1 + s_2p) - 2 s_(p+2)``, ``s_k = Σ y^k``.

    ``s_2 + s_2² - 2 s_3`` for softmax, ``1 - s_4`` for L2. ``‖J‖_F / sqrt(S)`` is the root mean square response
    to a random direction of logits. Differences below about eps are lost where the weights are nearly one-hot.
    Arguments and errors as in :func:`jacobian`.

    >>> import jax.numpy as jnp
    >>> from attnorm import l2
    >>> from attnorm.theory import jacobian_frobenius_norm
    >>> print(round(float(jacobian_frobenius_norm(l2(jnp.zeros(100)), 2)), 4))  # sqrt(1 - 1/100)
    0.995
    """
    _check_finite_p(p)
    s_2, s_2p, s_p2 = (jnp.sum(weights**k, axis=-1) for k in (2, 2 * p, p + 2))
    return jnp.sqrt(jnp.maximum(s_2 * (1 + s_2p) - 2 * s_p2, 0))


def jacobian_spectral_norm(weights: Float[Array, "... S"], p: float) -> Float[Array, "..."]:
    """Spectral norm ‖J‖₂ of :func:`jacobian`: the largest response to any direction of logits.

    At most 1/2 for softmax, ``2^(-1/p)`` for 1 <= p <= 2, whatever S; unbounded in S for p > 2. Forms the S × S
    Jacobian, at O(S³). Arguments and errors as in :func:`jacobian`.

    >>> import jax.numpy as jnp
    >>> from attnorm import l2
    >>> from attnorm.theory import jacobian_spectral_norm
    >>> print(round(float(jacobian_spectral_norm(l2(jnp.zeros(2)), 2)), 4))  # the supremum, 1 / sqrt(2)
    0.7071
    """
    return jnp.linalg.norm(jacobian(weights, p), ord=2, axis=(-2, -1))


def weak_weight_bounds(
    num_keys: int, max_abs_logit: float, *, p: float = 1.0, temperature: float = 1.0
) -> tuple[float, float]:
    """Bounds on every L_p weight for logits in [-a, a]: ``N^(-1/p) exp(-2a/T) <= y_j <= N^(-1/p) exp(2a/T)``.

    With bounded logits every single weight vanishes as N grows, unless p = ∞: no key can stay selected.

    Args:
      num_keys: N, the number of visible keys.
      max_abs_logit: a, the bound on the logits before the temperature.
      p: positive, ``math.inf`` included.
      temperature: T, positive.

    Raises:
      ValueError: an argument outside its range.

    Source: Lemma 1 and Corollary 1 of "Limitations of Normalization in Attention", arXiv 2508.17821, for p = 1;
    the extension to L_p is ours.

    >>> from attnorm.theory import weak_weight_bounds
    >>> low, high = weak_weight_bounds(10000, 1.0, p=2)
    >>> print(f"{low:.5f} {high:.5f}")
    0.00135 0.07389
    """
    _check_p(p)
    if not num_keys >= 1:
        raise ValueError(f"num_keys must be at least 1, got {num_keys}")
    if not 0 <= max_abs_logit < math.inf:
        raise ValueError(f"max_abs_logit must be at least 0 and finite, got {max_abs_logit}")
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    uniform = num_keys ** (-1 / p)
    spread = math.exp(2 * max_abs_logit / temperature)
    return uniform / spread, uniform * spread


def _check_p(p: float) -> None:
    if not p > 0:
        raise ValueError(f"p must be positive, got {p}")


def _check_finite_p(p: float) -> None:
    if not 0 < p < math.inf:
        raise ValueError(f"p must be positive and finite, got {p}")
