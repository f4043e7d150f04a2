"""The Jacobian of L_p weights and its norms.

Notation: logits ``s``, ``y = lp(s, p=p)`` with ``Σ y^p = 1``, ``J = ∂y/∂s``. A row without visible keys has
weights 0; its norms are 0.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from attnorm.theory._checks import check_finite_p


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
    check_finite_p(p)
    diagonal = weights[..., :, None] * jnp.eye(weights.shape[-1], dtype=weights.dtype)
    return diagonal - weights[..., :, None] * weights[..., None, :] ** p


def jacobian_frobenius_norm(weights: Float[Array, "... S"], p: float) -> Float[Array, "..."]:
    """Frobenius norm of :func:`jacobian` in O(S): ``‖J‖_F² = s_2 (1 + s_2p) - 2 s_(p+2)``, ``s_k = Σ y^k``.

    ``s_2 + s_2² - 2 s_3`` for softmax, ``1 - s_4`` for L2. ``‖J‖_F / sqrt(S)`` is the root mean square
    response to a random direction of logits. Differences below about eps are lost where the weights are
    nearly one-hot. Arguments and errors as in :func:`jacobian`.

    >>> import jax.numpy as jnp
    >>> from attnorm import l2
    >>> from attnorm.theory import jacobian_frobenius_norm
    >>> print(round(float(jacobian_frobenius_norm(l2(jnp.zeros(100)), 2)), 4))  # sqrt(1 - 1/100)
    0.995
    """
    check_finite_p(p)
    s_2, s_2p, s_p2 = (jnp.sum(weights**k, axis=-1) for k in (2, 2 * p, p + 2))
    return jnp.sqrt(jnp.maximum(s_2 * (1 + s_2p) - 2 * s_p2, 0))


def jacobian_spectral_norm(weights: Float[Array, "... S"], p: float) -> Float[Array, "..."]:
    """Spectral norm ‖J‖₂ of :func:`jacobian`: the largest response to any direction of logits.

    Forms the S × S Jacobian, at O(S³); see :func:`proved_spectral_bound`. Arguments and errors as in
    :func:`jacobian`.

    >>> import jax.numpy as jnp
    >>> from attnorm import l2
    >>> from attnorm.theory import jacobian_spectral_norm
    >>> print(round(float(jacobian_spectral_norm(l2(jnp.zeros(2)), 2)), 4))  # the supremum, 1 / sqrt(2)
    0.7071
    """
    return jnp.linalg.norm(jacobian(weights, p), ord=2, axis=(-2, -1))
