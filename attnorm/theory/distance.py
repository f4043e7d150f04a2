"""How far the keys that a row does not select lie from those it does.

One row: weights ``α`` of L keys, their vectors ``x_i``, and a set I of N selected keys, ``y_i = α_i x_i``:

    s = Σ_(i in I) y_i            d̃ = Σ_(i not in I) ‖s - y_i‖

A small d̃ means that selected and other keys cannot be told apart. Weights must not be negative; how they are
normalised does not matter. Use ``jax.vmap`` for more rows.

Source: Section 3 of "Limitations of Normalization in Attention", arXiv 2508.17821: the distance, the two
terms of Theorem 1.1, the exclusion probability and the Jensen gap of Theorem 1.2, Corollary 2. The statements
named ``proved_*`` and their proofs are ours.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from attnorm.theory._checks import check_num_selected


def top_keys(weights: Float[Array, "... S"], num_selected: int | Int[Array, ""]) -> Bool[Array, "... S"]:
    """The ``num_selected`` keys with the largest weights; of equal ones, the first.

    Raises:
      ValueError: num_selected is not from 1 to S.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import top_keys
    >>> print(top_keys(jnp.array([0.2, 0.5, 0.1, 0.2]), 2))
    [ True  True False False]
    """
    check_num_selected(num_selected, weights.shape[-1])
    order = jnp.argsort(-weights, axis=-1, stable=True)
    return jnp.argsort(order, axis=-1) < num_selected  # the rank of each key


def selection_distance(
    weights: Float[Array, "S"],
    x: Float[Array, "S D"],
    selected: Bool[Array, "S"],
    *,
    aggregate: str = "norms",
) -> Float[Array, ""]:
    """The distance ``d̃ = Σ_(i not in I) ‖s - α_i x_i‖`` of the keys outside a selection from its sum s.

    Args:
      weights: α, not negative.
      x: the vectors of the keys.
      selected: I, True at the selected keys.
      aggregate: ``"norms"``, the sum of the norms above, 0 if all keys are selected; or ``"vector"``, the
        norm of the sum, ``‖s - Σ_(i not in I) α_i x_i‖``, as some reviews of the paper print it, ``‖s‖`` if
        all are selected.

    Raises:
      ValueError: another aggregate.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import selection_distance
    >>> weights, x = jnp.full(4, 0.25), jnp.ones((4, 1))
    >>> selected = jnp.array([True, True, False, False])
    >>> [float(selection_distance(weights, x, selected, aggregate=a)) for a in ("norms", "vector")]
    [0.5, 0.0]
    """
    y = weights[:, None] * x
    s = jnp.sum(jnp.where(selected[:, None], y, 0), axis=0)
    if aggregate == "norms":
        return jnp.sum(jnp.where(selected, 0, jnp.linalg.norm(s - y, axis=-1)))
    if aggregate == "vector":
        return jnp.linalg.norm(2 * s - jnp.sum(y, axis=0))
    raise ValueError(f"aggregate must be 'norms' or 'vector', got {aggregate!r}")


def proved_distance_bound(
    weights: Float[Array, "S"], x: Float[Array, "S D"], selected: Bool[Array, "S"]
) -> Float[Array, ""]:
    """Theorem 1.1 as proved: ``d̃ <= A d_1 + max_(j in I) ‖x_j‖ · (ᾱ (L - N) - A)`` for the N largest.

    ``ᾱ`` is the sum of the selected weights and A that of the others (1 - ᾱ for softmax), ``d_1`` the largest
    distance ``‖x_i - x_j‖`` of a key outside from a key inside.

    Proof. With ``x̄ = s/ᾱ``, ``s - α_i x_i = α_i (x̄ - x_i) + (ᾱ - α_i) x̄``. x̄ is a mean of selected
    vectors, so ``‖x̄ - x_i‖ <= d_1`` and ``‖x̄‖ <= max ‖x_j‖``; ``ᾱ >= α_i`` because each selected weight is
    at least α_i. Take norms and sum over the L - N keys outside. For arbitrary sets ᾱ may be less than α_i,
    and the bound is false.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import proved_distance_bound, selection_distance, top_keys
    >>> weights, x = jnp.array([0.5, 0.3, 0.2]), jnp.eye(3)
    >>> selected = top_keys(weights, 1)
    >>> d, bound = selection_distance(weights, x, selected), proved_distance_bound(weights, x, selected)
    >>> print(f"{d:.3f} <= {bound:.3f}")
    1.122 <= 1.207
    """
    distance_term, norm_term = _theorem_1_terms(weights, x, selected)
    return distance_term[0] * distance_term[1] + norm_term[0] * norm_term[1]


def paper_distance_bound(
    weights: Float[Array, "S"], x: Float[Array, "S D"], selected: Bool[Array, "S"]
) -> Float[Array, ""]:
    """Theorem 1.1 with a square root around the bracket, as a review of the paper prints it: **false**.

    ``d̃ <= A d_1 + max_(j in I) ‖x_j‖ · sqrt(ᾱ (L - N) - A)``. For L identical vectors of norm 1, N selected
    and uniform softmax weights, d̃ is the bracket ``(L - N) (N - 1) / L`` itself and ``d_1 = 0``, so the form
    fails wherever the bracket exceeds 1. Arguments as in :func:`proved_distance_bound`.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import paper_distance_bound, selection_distance, top_keys
    >>> weights, x = jnp.full(100, 0.01), jnp.ones((100, 1))
    >>> selected = top_keys(weights, 10)
    >>> d, form = selection_distance(weights, x, selected), paper_distance_bound(weights, x, selected)
    >>> print(f"{d:.2f} > {form:.2f}")
    8.10 > 2.85
    """
    distance_term, norm_term = _theorem_1_terms(weights, x, selected)
    return distance_term[0] * distance_term[1] + norm_term[0] * jnp.sqrt(jnp.maximum(norm_term[1], 0))


def _theorem_1_terms(weights, x, selected):
    outside = ~selected
    weight_inside = jnp.sum(jnp.where(selected, weights, 0))
    weight_outside = jnp.sum(jnp.where(outside, weights, 0))
    squares = jnp.sum(x**2, axis=-1)
    pairs = jnp.sum((x[:, None] - x[None]) ** 2, axis=-1)
    farthest = jnp.sqrt(jnp.max(jnp.where(outside[:, None] & selected[None], pairs, 0)))
    largest = jnp.sqrt(jnp.max(jnp.where(selected, squares, 0)))
    bracket = weight_inside * jnp.sum(outside) - weight_outside
    return (weight_outside, farthest), (largest, bracket)


def proved_expected_distance_bounds(
    weights: Float[Array, "S"], x: Float[Array, "S D"], num_selected: int | Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Theorem 1.2, two-sided: bounds on ``E d̃`` when I is uniform over all sets of N keys. O(S D).

    With ``y_j = α_j x_j``, ``Y_i = Σ_(j≠i) y_j``, ``p = N/(L-1)``:

        (L-N)/L Σ_i ‖p Y_i - y_i‖  <=  E d̃  <=  (L-N)/L Σ_i sqrt(‖p Y_i - y_i‖² + V_i)

    Proof. Key i is outside with probability (L-N)/L; given that, I is uniform over the N-sets of the M = L-1
    other keys, so s has mean ``p Y_i``. The lower bound is Jensen's inequality (the paper states this form
    plus an error ε, the Jensen gap). For the upper one, ``E ‖s - y_i‖ <= sqrt(E ‖s - y_i‖²)``, and a sum of N
    vectors drawn without replacement has variance ``V_i = p (1-p) M/(M-1) (Σ_(j≠i) ‖y_j‖² - ‖Y_i‖²/M)``, 0
    for L = 2.

    Returns:
      The lower and the upper bound; both are 0 at N = L.

    Raises:
      ValueError: num_selected is not from 1 to S.

    >>> import jax.numpy as jnp
    >>> from attnorm import softmax
    >>> from attnorm.theory import proved_expected_distance_bounds
    >>> low, high = proved_expected_distance_bounds(softmax(jnp.arange(4.0)), jnp.eye(4), 2)
    >>> print(f"{low:.3f} {high:.3f}")
    1.044 1.196
    """
    L = weights.shape[-1]
    check_num_selected(num_selected, L)
    if L == 1:
        return jnp.zeros(()), jnp.zeros(())
    y = weights[:, None] * x
    others = L - 1
    share = num_selected / others
    others_sum = jnp.sum(y, axis=0) - y
    squares = jnp.sum(y**2, axis=-1)
    mean_squared = jnp.sum((share * others_sum - y) ** 2, axis=-1)
    spread = jnp.sum(squares) - squares - jnp.sum(others_sum**2, axis=-1) / others
    variance = share * (1 - share) * others / max(others - 1, 1) * jnp.maximum(spread, 0)
    # At N = L the share exceeds 1; no key is outside, and the factor is 0.
    upper_squared = mean_squared + jnp.maximum(variance, 0)
    excluded = (L - num_selected) / L
    return excluded * jnp.sum(jnp.sqrt(mean_squared)), excluded * jnp.sum(jnp.sqrt(upper_squared))


def proved_expected_distance_ceiling(
    weights: Float[Array, "S"], x: Float[Array, "S D"], num_selected: int | Int[Array, ""]
) -> Float[Array, ""]:
    """Corollary 2 made precise: ``E d̃ <= (1 + N) (L-N)/L Σ_i α_i ‖x_i‖`` for a random set of N keys.

    For softmax and ``‖x‖ <= 1`` that is at most N + 1, so the expectation cannot grow with L; under L2 it can
    grow like sqrt(L), since the weights sum to at most sqrt(L).

    Proof. ``Σ_(i not in I) ‖s - y_i‖ <= (L-N) ‖s‖ + Σ_(i not in I) ‖y_i‖``; a key is inside with probability
    N/L and outside with probability (L-N)/L.

    Raises:
      ValueError: num_selected is not from 1 to S.

    >>> import jax.numpy as jnp
    >>> from attnorm import l2, softmax
    >>> from attnorm.theory import proved_expected_distance_ceiling
    >>> s, x = jnp.zeros(10000), jnp.ones((10000, 1))
    >>> print(*(round(float(proved_expected_distance_ceiling(f(s), x, 5)), 2) for f in (softmax, l2)))
    6.0 599.7
    """
    L = weights.shape[-1]
    check_num_selected(num_selected, L)
    norms = jnp.linalg.norm(weights[:, None] * x, axis=-1)
    return (1 + num_selected) * (L - num_selected) / L * jnp.sum(norms)


def proved_expected_distance_limit(
    weights: Float[Array, "S"], x: Float[Array, "S D"], num_excluded: int
) -> Float[Array, ""]:
    """The limit of ``E d̃`` for L -> ∞ with L - N = c keys excluded: ``c ‖Σ_j α_j x_j‖``, not 0.

    With few keys left out s is nearly the full sum, and so far from each single ``y_i`` as that sum is long.
    The error is at most ``(c (c + 1) / L) Σ_j α_j ‖x_j‖``: each of the c norms differs from ``‖Σ y‖`` by at
    most the c excluded ``‖y‖`` and once more its own, c + 1 times their mean ``Σ‖y‖ / L`` in expectation.

    >>> import jax.numpy as jnp
    >>> from attnorm.theory import proved_expected_distance_limit
    >>> print(float(proved_expected_distance_limit(jnp.full(8, 1 / 8), jnp.ones((8, 1)), 3)))
    3.0
    """
    return num_excluded * jnp.linalg.norm(weights @ x)
