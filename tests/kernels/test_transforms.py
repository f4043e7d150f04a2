"""JAX transformations of the kernels: the contract's tests, interpreted."""

import pytest

from tests.contract import test_transforms
from tests.contract.test_transforms import (  # noqa: F401
    test_a_scan_over_layers,
    test_jacrev_is_the_same_everywhere,
    test_jit_and_no_jit_agree,
    test_remat_changes_no_gradient,
    test_vmap_along_other_axes,
    test_vmap_of_the_gradient_over_any_argument,
)

pytestmark = pytest.mark.slow


def test_shard_map(attend):
    # JAX's interpreter of kernels has no rules for check_vma; the compile tests cover it.
    test_transforms.test_shard_map_on_one_device(attend, check_vma=False)
