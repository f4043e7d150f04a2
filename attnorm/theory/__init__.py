"""Identities and bounds of attention weights, as pure functions that can be jitted and mapped.

What is named ``paper_*`` is a statement of "Limitations of Normalization in Attention" (arXiv 2508.17821),
right or wrong, as its docstring says; what is named ``proved_*`` is proved in its docstring and holds.
"""

from attnorm.theory.distance import (
    paper_distance_bound,
    proved_distance_bound,
    proved_expected_distance_bounds,
    proved_expected_distance_ceiling,
    proved_expected_distance_limit,
    selection_distance,
    top_keys,
)
from attnorm.theory.identities import effective_keys, entropy, lp_from_softmax_factor, renyi_entropy
from attnorm.theory.jacobian import jacobian, jacobian_frobenius_norm, jacobian_spectral_norm
from attnorm.theory.sensitivity import (
    finite_difference,
    paper_gradient_bound,
    proved_finite_difference_bound,
    proved_frobenius_bound,
    proved_largest_entry_bound,
    proved_smooth_gradient_bounds,
    proved_spectral_bound,
    proved_spectral_bound_at,
    top_direction,
)
from attnorm.theory.separability import (
    Retrieval,
    paper_head_coverage,
    paper_separability_bounds,
    proved_distance_ceiling,
    proved_mean_distance_floor,
    proved_separability_upper_bound,
    retrieval,
    retrieval_of_distances,
    separable_fraction,
)
from attnorm.theory.weight_bounds import (
    logit_bound,
    paper_softmax_weight_bounds,
    proved_effective_keys_bounds,
    proved_entropy_bounds,
    proved_factor_bounds,
    proved_norm_bounds,
    proved_weight_bounds,
)

__all__ = [
    "Retrieval",
    "effective_keys",
    "entropy",
    "finite_difference",
    "jacobian",
    "jacobian_frobenius_norm",
    "jacobian_spectral_norm",
    "logit_bound",
    "lp_from_softmax_factor",
    "paper_distance_bound",
    "paper_gradient_bound",
    "paper_head_coverage",
    "paper_separability_bounds",
    "paper_softmax_weight_bounds",
    "proved_distance_bound",
    "proved_distance_ceiling",
    "proved_effective_keys_bounds",
    "proved_entropy_bounds",
    "proved_expected_distance_bounds",
    "proved_expected_distance_ceiling",
    "proved_expected_distance_limit",
    "proved_factor_bounds",
    "proved_finite_difference_bound",
    "proved_frobenius_bound",
    "proved_largest_entry_bound",
    "proved_mean_distance_floor",
    "proved_norm_bounds",
    "proved_separability_upper_bound",
    "proved_smooth_gradient_bounds",
    "proved_spectral_bound",
    "proved_spectral_bound_at",
    "proved_weight_bounds",
    "renyi_entropy",
    "retrieval",
    "retrieval_of_distances",
    "selection_distance",
    "separable_fraction",
    "top_direction",
    "top_keys",
]
