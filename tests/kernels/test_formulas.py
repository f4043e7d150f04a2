"""The normalisers that have a published formula on the kernels, interpreted, where these serve them."""

import pytest

from attnorm import kernels
from tests.contract.test_formulas import FIRST, check
from tests.kernels.conftest import INTERPRET
from tests.kernels.features import FUSED


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FIRST if name in FUSED])
def test_formula(name):
    with kernels.config(INTERPRET):
        check(FIRST[name], "pallas_tpu")
