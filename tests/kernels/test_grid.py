"""The contract's grid on the kernels, interpreted."""

import pytest

from attnorm import kernels
from tests.contract.cases import FACTORS, FAST_FACTORS, NORMALIZER_CASES, RESTRICTIONS, pairwise
from tests.contract.test_grid import check
from tests.kernels.conftest import INTERPRET

OWN = {"dtype": ["f32", "f32", "bf16", "f16"], "blocks": [None]}
FAST_CASES = pairwise(
    FAST_FACTORS | OWN | {"lengths": [(1, 300), (128, 128), (200, 130)], "heads": [(1, 1), (6, 2), (4, 1)]},
    count=len(RESTRICTIONS) // 4,
    cost=2e7,
    seed=2,
)
# The last choice of parameters has arrays wherever the normaliser takes them.
LAST = dict(case.normalizer for case in NORMALIZER_CASES)
SLOW_CASES = pairwise(FACTORS | OWN, count=len(RESTRICTIONS) // 3, cost=2e8, seed=3)


@pytest.mark.parametrize(
    "case", [case for case in NORMALIZER_CASES if case.normalizer in LAST.items()], ids=str
)
def test_normalizer(case):
    with kernels.config(INTERPRET):
        check(case, "pallas_tpu")


@pytest.mark.parametrize("case", FAST_CASES, ids=str)
def test_case(case):
    with kernels.config(INTERPRET):
        check(case, "pallas_tpu")


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_slow_case(case):
    with kernels.config(INTERPRET):
        check(case, "pallas_tpu")
