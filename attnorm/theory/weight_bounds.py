"""Bounds on weights, their norms and entropies that follow from bounded logits, or from the norm alone.

Source: Lemma 1 and Corollary 1 of "Limitations of Normalization in Attention", arXiv 2508.17821, for
softmax-type weights ``F(l_i) / Σ_j F(l_j)``; the constants of Lemma 1 and everything about L_p are ours.

Every weight of F-normalised keys lies within a factor ``C = max F / min F`` of the uniform weight L^(-1/p):
with F between ``min F`` and ``max F``, ``F_i / (Σ F^p)^(1/p)`` is least where F_i = min F and all others are
max F. The bounds hold for smooth and positive F that know nothing of L. They say nothing about F that grow
with L (log-length scaling) or that can be 0 (sparsemax, entmax, ReLU).
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from attnorm.theory._checks import check, check_num_keys, check_p, check_positive


def logit_bound(query: Float[Array, "H"], keys: Float[Array, "S H"]) -> Float[Array, ""]:
    """The bound ``Δ = ‖q‖ max_j ‖k_j‖`` on ``|<q, k_j>|``.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import logit_bound
    >>> float(logit_bound(jnp.array([3.0, 4.0]), jnp.array([[1.0, 0.0], [0.0, 2.0]])))
    10.0
    """
    return jnp.linalg.norm(query) * jnp.max(jnp.linalg.norm(keys, axis=-1))


def paper_softmax_weight_bounds(num_keys: int, max_abs_logit: float, *, temperature: float = 1.0):
    """Corollary 1 of the paper: ``e^(-2Δ/T) / L <= a_i <= e^(2Δ/T) / L`` for ``softmax(l/T)``. It holds.

    Args:
      num_keys: L.
      max_abs_logit: Δ, see :func:`logit_bound`; the logits are taken before the temperature.
      temperature: T, positive.

    Returns:
      The lower and the upper bound.

    Raises:
      ValueError: an argument outside its range.

    Source: arXiv 2508.17821, Corollary 1.

    >>> from attnorm.theory import paper_softmax_weight_bounds
    >>> low, high = paper_softmax_weight_bounds(1000, 1.0, temperature=2.0)
    >>> print(f"{low:.6f} {high:.6f}")
    0.000368 0.002718
    """
    _check_logits(num_keys, max_abs_logit, temperature)
    # Not by way of proved_weight_bounds, where a ratio that overflows is refused.
    return _around_uniform(num_keys, jnp.exp(2 * max_abs_logit / temperature), 1.0)


def proved_weight_bounds(num_keys: int, ratio: float, *, p: float = 1.0):
    """Lemma 1 with its constants, for any L_p: ``L^(-1/p) / C <= y_i <= L^(-1/p) C``, ``C = max F / min F``.

    With a bounded C every single weight vanishes as L grows, unless p = ∞: no key can stay selected.

    Args:
      num_keys: L.
      ratio: C, at least 1: largest over smallest value of F on the logits' range; ``e^(2Δ/T)`` for ``exp(l/T)`` and
        logits in [-Δ, Δ].
      p: positive, ``math.inf`` included.

    Returns:
      The lower and the upper bound.

    Raises:
      ValueError: an argument outside its range.

    >>> from attnorm.theory import proved_weight_bounds
    >>> proved_weight_bounds(100, 2.0, p=2)
    (0.05, 0.2)
    """
    check_p(p)
    check_num_keys(num_keys)
    _check_ratio(ratio)
    return _around_uniform(num_keys, ratio, p)


def proved_entropy_bounds(num_keys: int, max_abs_logit: float, *, temperature: float = 1.0):
    """Shannon entropy of ``softmax(l/T)`` in nats: ``log L - 2Δ/T <= H <= log L``.

    The lower bound is ``-log`` of the largest weight that Corollary 1 allows; it may be negative, and 0 is
    then the better one. Arguments and errors as in :func:`paper_softmax_weight_bounds`.

    >>> from attnorm.theory import proved_entropy_bounds
    >>> print(*(round(float(bound), 3) for bound in proved_entropy_bounds(1000, 1.0)))
    4.908 6.908
    """
    _check_logits(num_keys, max_abs_logit, temperature)
    return jnp.log(num_keys) - 2 * max_abs_logit / temperature, jnp.log(num_keys)


def proved_effective_keys_bounds(num_keys: int, ratio: float):
    """Effective number of keys: ``4 C L / (1 + C)² <= N_eff <= L``, C the ratio of the extreme F.

    N_eff does not depend on p, and the lower bound is Kantorovich's inequality: it is attained where a
    fraction ``1 / (1 + C)`` of the keys has max F and the others min F. Arguments and errors as in
    :func:`proved_weight_bounds`.

    >>> from attnorm.theory import proved_effective_keys_bounds
    >>> proved_effective_keys_bounds(100, 4.0)
    (64.0, 100)
    """
    check_num_keys(num_keys)
    _check_ratio(ratio)
    return 4 * ratio * num_keys / (1 + ratio) ** 2, num_keys


def proved_norm_bounds(num_keys: int, *, p: float, order: float = 2.0):
    """Range of ``‖y‖_order`` where ``‖y‖_p = 1``: from 1 (one-hot) to ``L^(1/order - 1/p)`` (uniform).

    Under order 2, the root of the output variance for uncorrelated unit-variance values: softmax falls to
    L^(-1/2), p > 2 rises to L^(1/2 - 1/p), and p = 2 alone has 1 on both sides.

    Raises:
      ValueError: p or order not positive, num_keys < 1.

    >>> from attnorm.theory import proved_norm_bounds
    >>> proved_norm_bounds(16, p=1), proved_norm_bounds(16, p=2), proved_norm_bounds(16, p=4)
    ((0.25, 1), (1.0, 1), (1, 2.0))
    """
    check_p(p)
    check_positive("order", order)
    check_num_keys(num_keys)
    uniform = num_keys ** (1 / order - 1 / p)
    return (uniform, 1) if order >= p else (1, uniform)


def proved_factor_bounds(num_keys: int, *, p: float):
    """Range of :func:`lp_from_softmax_factor`, between softmax and L_p weights: 1 to ``L^(1 - 1/p)``.

    For p < 1 the order is reversed: ``L^(1 - 1/p)`` to 1. One-hot rows give 1, uniform rows the other end.

    Raises:
      ValueError: p not positive, num_keys < 1.

    >>> from attnorm.theory import proved_factor_bounds
    >>> proved_factor_bounds(16, p=2), proved_factor_bounds(16, p=0.5)
    ((1, 4.0), (0.0625, 1))
    """
    check_p(p)
    check_num_keys(num_keys)
    uniform = num_keys ** (1 - 1 / p)
    return (1, uniform) if p >= 1 else (uniform, 1)


def _around_uniform(num_keys, ratio, p):
    uniform = num_keys ** (-1 / p)
    return uniform / ratio, uniform * ratio


def _check_logits(num_keys, max_abs_logit, temperature):
    check_num_keys(num_keys)
    check("max_abs_logit", max_abs_logit, "at least 0 and finite", lambda a: 0 <= a < math.inf)
    check_positive("temperature", temperature)


def _check_ratio(ratio):
    check("ratio", ratio, "at least 1 and finite", lambda ratio: 1 <= ratio < math.inf)
