"""How much weights can change with their logits.

Notation: ``F = exp(l/T)``, ``w = softmax(p l/T)``, ``y = w^(1/p)`` the L_p weights, J_p their Jacobian.

**p = 2 is the largest p whose worst-case gradient does not grow with the number of keys L.**

Theorem (ours). With ``C_p = 2^(-1/p)`` for 1 <= p <= 2, 1/2 for p < 1, and ``2^(-1/p) L^(1/2 - 1/p)`` for
p > 2,

    ‖J_p‖₂ <= C_p / T.

For 1 <= p <= 2 it is attained by two equal dominant logits, for every L >= 2. For p > 2 the order in L is
sharp.

Proof. ``∂y_i/∂l_j = y_i (δ_ij - w_j) / T``. For a unit vector x let ``d = x - <w, x>``, so that

    ‖T J_p x‖² = Σ_i y_i² d_i² = Σ_i w_i^(2/p) d_i².

Three sums bound it:

1. ``Σ w d² <= 1/2``: the variance of x under w is at most ``(max x - min x)²/4``, and
   ``(max x - min x)² <= 2 ‖x‖²``.
2. ``Σ w² d² <= 1/4``: it is ``‖(diag w - w wᵀ) x‖²``, and 1. says that no eigenvalue of that symmetric matrix
   exceeds 1/2.
3. ``Σ d² <= L ‖w‖²``: ``d = (I - 1 wᵀ) x``, and an oblique projection and its complement have the same norm,
   here ``‖1‖ ‖w‖``.

For p < 1, ``w^(2/p) <= w²``: use 2. For 1 <= p <= 2, Hölder with the exponents ``2 - 2/p`` of 1. and
``2/p - 1`` of 2. gives ``2^(-(2 - 2/p)) · 4^(-(2/p - 1)) = 2^(-2/p)``. For p >= 2, Hölder with the exponents
``2/p`` of 1. and ``1 - 2/p`` of 3. gives ``2^(-2/p) (L ‖w‖²)^(1 - 2/p)``, and ``‖w‖ <= 1``.
Two equal logits above all others have ``w = (1/2, 1/2)``, and ``x = (1, -1)/sqrt(2)`` gives ``2^(-2/p)``.
The growth for p > 2 is real: one logit above L - 1 equal ones with ``w_1 = 1/2`` has ``w_j = 1/(2 (L-1))``;
``x = e_1`` has ``d_j = -1/2``, and ``‖T J x‖² >= (L-1)^(1 - 2/p) 2^(-2/p) / 4``. ∎

For any smooth positive F in place of exp, ``∂y_i/∂l_j = y_i (δ_ij - w_j) F'(l_j)/F(l_j)`` with
``w = F^p / Σ F^p``: the same constants, with ``max |F'/F|`` in place of 1/T.

Source: Corollary 3 and Section 5 of "Limitations of Normalization in Attention", arXiv 2508.17821, for the
paper's form and for g; the rest is ours.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnorm.normalizers import lp
from attnorm.theory._checks import check_num_keys, check_p, check_positive


def paper_gradient_bound(temperature: float) -> Float[Array, ""]:
    """Corollary 3 of the paper, ``‖∇ softmax(l/T)‖₂ <= min{1/(4T), sqrt(2)}``: as a spectral norm, **false**.

    Two equal logits have ``1/(2T)``. ``1/(4T)`` bounds the largest entry of the Jacobian, and sqrt(2) is the
    largest distance of two weight vectors, not of a derivative: no number bounds the gradient at all T.

    Raises:
      ValueError: temperature not positive.

    Source: arXiv 2508.17821, Corollary 3.

    >>> import jax.numpy as jnp
    >>> from attnorm import softmax
    >>> from attnorm.theory import jacobian_spectral_norm, paper_gradient_bound
    >>> norm = jacobian_spectral_norm(softmax(jnp.zeros(2)), 1)
    >>> print(f"{norm:.2f} > {paper_gradient_bound(1.0):.2f}")
    0.50 > 0.25
    """
    check_positive("temperature", temperature)
    return jnp.minimum(1 / (4 * jnp.asarray(temperature)), math.sqrt(2))


def proved_largest_entry_bound(temperature: float) -> Float[Array, ""]:
    """The largest entry of the Jacobian of ``softmax(l/T)`` is at most ``1/(4T)``: ``a (1 - a) <= 1/4``.

    Raises:
      ValueError: temperature not positive.

    >>> from attnorm.theory import proved_largest_entry_bound
    >>> float(proved_largest_entry_bound(0.5))
    0.5
    """
    check_positive("temperature", temperature)
    return 1 / (4 * jnp.asarray(temperature))


def proved_spectral_bound(num_keys: int, *, p: float, temperature: float = 1.0) -> Float[Array, ""]:
    """``sup ‖J_p‖₂ <= C_p / T`` over all logits of L keys; the theorem at the head of this module.

    ``2^(-1/p) / T`` for 1 <= p <= 2 (attained: 1/(2T) for softmax, 1/(sqrt(2) T) for L2), ``1/(2T)`` for
    p < 1, ``2^(-1/p) L^(1/2 - 1/p) / T`` for p > 2 (its order in L is sharp), ``sqrt(L) / T`` for p = ∞. For
    weights of a general smooth positive F put ``1 / max |F'/F|`` in place of T.

    Args:
      num_keys: L.
      p: positive, ``math.inf`` included.
      temperature: T, positive.

    Raises:
      ValueError: an argument outside its range.

    >>> from attnorm.theory import proved_spectral_bound
    >>> print(*(f"{proved_spectral_bound(10000, p=p):.3f}" for p in (1, 2, 3, float("inf"))))
    0.500 0.707 3.684 100.000
    """
    check_p(p)
    check_num_keys(num_keys)
    check_positive("temperature", temperature)
    if p < 1:
        return jnp.asarray(0.5) / temperature
    growth = num_keys ** (1 / 2 - 1 / p) if p > 2 else 1.0
    return jnp.asarray(2 ** (-1 / p) * growth) / temperature


def proved_spectral_bound_at(
    weights: Float[Array, "... S"], *, p: float, temperature: float = 1.0
) -> Float[Array, "..."]:
    """``‖J_p‖₂`` at given L_p weights, p >= 2: ``2^(-1/p) (sqrt(L) ‖w‖₂)^(1 - 2/p) / T`` with ``w = y^p``.

    Far below :func:`proved_spectral_bound` where the weights are spread out.

    Raises:
      ValueError: p < 2 or infinite, temperature not positive.

    >>> import jax.numpy as jnp
    >>> from attnorm import lp
    >>> from attnorm.theory import proved_spectral_bound_at
    >>> print(round(float(proved_spectral_bound_at(lp(jnp.zeros(10000), p=4), p=4)), 4))
    0.8409
    """
    if not 2 <= p < math.inf:
        raise ValueError(f"p must be at least 2 and finite, got {p}")
    check_positive("temperature", temperature)
    L = weights.shape[-1]
    norm = jnp.linalg.norm(weights**p, axis=-1)
    return 2 ** (-1 / p) * (math.sqrt(L) * norm) ** (1 - 2 / p) / temperature


def proved_frobenius_bound(num_keys: int, *, p: float, temperature: float = 1.0) -> Float[Array, ""]:
    """``‖J_p‖_F <= sqrt(1 - 1/L) / T`` for p <= 2; for p >= 2 see below.

    ``(1 - 1/L)^(1/p) (2 (L - 1))^(1/2 - 1/p) / T`` for p >= 2. Attained at p = 2, by equal logits, and at ∞.
    The root mean square response to a random unit direction of logits is ``‖J‖_F / sqrt(L)``: for p <= 2 it
    vanishes like L^(-1/2) even where the worst direction does not.

    Proof. ``T² ‖J_p‖_F² = Σ_i w_i^(2/p) ‖e_i - w‖²``. For p <= 2, ``w^(2/p) <= w`` leaves
    ``1 - ‖w‖² <= 1 - 1/L``. For p >= 2, Hölder with the exponents 2/p and 1 - 2/p and
    ``Σ_i ‖e_i - w‖² = L (1 + ‖w‖²) - 2 <= 2 (L - 1)``.

    Arguments and errors as in :func:`proved_spectral_bound`.

    >>> from attnorm.theory import proved_frobenius_bound
    >>> print(*(f"{proved_frobenius_bound(100, p=p):.3f}" for p in (1, 2, 4)))
    0.995 0.995 3.742
    """
    check_p(p)
    check_num_keys(num_keys)
    check_positive("temperature", temperature)
    share = 1 - 1 / num_keys
    if p <= 2:
        return jnp.asarray(math.sqrt(share)) / temperature
    return jnp.asarray(share ** (1 / p) * (2 * (num_keys - 1)) ** (1 / 2 - 1 / p)) / temperature


def proved_smooth_gradient_bounds(
    values: Float[Array, "S"], slopes: Float[Array, "S"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Two bounds on ‖J‖₂ of ``F(l_i) / Σ_j F(l_j)``, for any smooth positive F.

    ``½ max |F'/F|``, and ``max |F'| (1/S + sqrt(L) ‖F‖₂ / S²)`` with ``S = Σ F``.

    Proof. ``J = (diag α - α αᵀ) diag(F'/F)``, whose first factor has norm at most 1/2. And
    ``J_ij = δ_ij F'_i / S - F_i F'_j / S²`` with ``‖F'‖₂ <= sqrt(L) max |F'|``.

    Args:
      values: F at the logits, positive.
      slopes: F' at the logits.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import proved_smooth_gradient_bounds
    >>> l = jnp.zeros(4)  # F(l) = 1 + l²/2 + l
    >>> print(*(float(bound) for bound in proved_smooth_gradient_bounds(1 + l + l**2 / 2, 1 + l)))
    0.5 0.5
    """
    total = jnp.sum(values)
    steepest = jnp.max(jnp.abs(slopes))
    second = steepest * (1 / total + math.sqrt(values.shape[0]) * jnp.linalg.norm(values) / total**2)
    return jnp.max(jnp.abs(slopes / values)) / 2, second


def proved_finite_difference_bound(
    num_keys: int, *, p: float, temperature: float, step: float
) -> Float[Array, ""]:
    """Bound on :func:`finite_difference`: ``min{C_p / T, D_p / ε}``.

    C_p as in :func:`proved_spectral_bound` (the mean value theorem); D_p bounds the distance of any two
    weight vectors: sqrt(2) for p <= 2, ``2^(1/p) L^(1/2 - 1/p)`` for p >= 2, ``sqrt(L)`` for p = ∞.

    Proof of D_p. Weights are not negative, so ``‖y - y'‖₂² <= ‖y‖₂² + ‖y'‖₂² <= 2`` for p <= 2, where
    ``‖y‖₂ <= ‖y‖_p``; and ``‖y - y'‖_p^p <= 2`` with ``‖·‖₂ <= L^(1/2 - 1/p) ‖·‖_p`` for p >= 2.

    Args:
      num_keys: L.
      p: positive, ``math.inf`` included.
      temperature: T, positive.
      step: ε, the length of the change of the logits, positive.

    Raises:
      ValueError: an argument outside its range.

    >>> from attnorm.theory import proved_finite_difference_bound
    >>> print(*(f"{proved_finite_difference_bound(9, p=1, temperature=T, step=1.0):.2f}" for T in (0.1, 1.0)))
    1.41 0.50
    """
    check_positive("step", step)
    slope = proved_spectral_bound(num_keys, p=p, temperature=temperature)
    diameter = math.sqrt(2) if p <= 2 else 2 ** (1 / p) * num_keys ** (1 / 2 - 1 / p)
    return jnp.minimum(slope, diameter / step)


def finite_difference(
    logits: Float[Array, "S"],
    direction: Float[Array, "S"],
    *,
    temperature: float,
    step: float,
    p: float = 1.0,
) -> Float[Array, ""]:
    """The measured sensitivity ``g(T, ε) = ‖y((l + ε v)/T) - y(l/T)‖₂ / ε`` of L_p weights y.

    A random unit direction v sees ``‖J‖_F / sqrt(L)`` in the mean square, not ‖J‖₂.

    Args:
      logits: l, before the temperature.
      direction: v, of norm 1.
      temperature: T, positive.
      step: ε, positive.
      p: the norm of the weights that is 1.

    Raises:
      ValueError: an argument outside its range.

    Source: arXiv 2508.17821, Section 5, for p = 1.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import finite_difference
    >>> v = jnp.array([1.0, -1.0]) / jnp.sqrt(2)
    >>> print(round(float(finite_difference(jnp.zeros(2), v, temperature=1.0, step=0.1)), 2))
    0.5
    """
    check_positive("temperature", temperature)
    check_positive("step", step)
    after, before = (lp(s / temperature, p=p) for s in (logits + step * direction, logits))
    return jnp.linalg.norm(after - before) / step


def top_direction(
    function, logits: Float[Array, "S"], *, num_iterations: int = 64, start: Float[Array, "S"] | None = None
) -> tuple[Float[Array, ""], Float[Array, "S"]]:
    """The spectral norm of the Jacobian of any weights at these logits, and the direction that attains it.

    By power iteration on JᵀJ, so O(S) per iteration and never above the true norm. Where the two largest
    singular values are close the direction is a mixture of theirs.

    Args:
      function: logits -> weights, differentiable in both modes.
      logits: where.
      num_iterations: of the power iteration.
      start: a direction that is not orthogonal to the answer; a fixed random one by default.

    Returns:
      ``‖J v‖₂`` and v, of norm 1. Where J is 0, 0 and the start.

    >>> import jax.numpy as jnp
    >>> from attnorm import l2
    >>> from attnorm.theory import top_direction
    >>> norm, v = top_direction(l2, jnp.array([0.0, 0.0, -50.0]))
    >>> print(f"{norm:.4f}", jnp.abs(v).round(3))
    0.7071 [0.707 0.707 0.   ]
    """
    _, jvp = jax.linearize(function, logits)
    _, vjp = jax.vjp(function, logits)
    if start is None:
        start = jax.random.normal(jax.random.key(0), logits.shape, logits.dtype)

    def step(v, _):
        (back,) = vjp(jvp(v))
        norm = jnp.linalg.norm(back)
        return jnp.where(norm > 0, back / jnp.where(norm > 0, norm, 1), v), None

    v, _ = jax.lax.scan(step, start / jnp.linalg.norm(start), length=num_iterations)
    return jnp.linalg.norm(jvp(v)), v
