"""Tests of the contract whose outcome lies in the kernels, with these in place of what they are written for."""

import pytest

from tests.contract.test_known_faults import *  # noqa: F403
from tests.contract.test_masked import (  # noqa: F401
    test_a_bias_of_minus_infinity_hides_no_nan_of_a_value,
    test_a_logit_of_minus_infinity_is_a_hidden_key,
    test_a_number_hidden_from_some_rows_changes_nothing_there,
    test_a_row_without_keys_is_zero_with_its_own_log_norm,
    test_a_sink_without_keys_keeps_the_gradient_of_its_log_norm,
    test_a_visible_nan_is_not_hidden,
    test_empty_and_single_dimensions,
    test_numbers_that_nobody_sees_change_nothing,
    test_query_heads_share_the_key_heads_in_order,
    test_the_log_norm_is_as_exact_as_float32_for_narrow_inputs,
)

pytestmark = pytest.mark.slow
