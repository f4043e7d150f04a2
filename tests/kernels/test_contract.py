"""The tests of the contract, with the kernels in place of the implementations that they are written for."""

import pytest

from tests.contract.test_known_faults import *  # noqa: F403
from tests.contract.test_masked import *  # noqa: F403

pytestmark = pytest.mark.slow
