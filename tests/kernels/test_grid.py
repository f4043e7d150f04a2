"""The contract's grid on the kernels, interpreted."""

import pytest

from attnorm import kernels
from tests.contract.cases import FACTORS, FAST_FACTORS, NORMALIZER_CASES, RESTRICTIONS, Case, pairwise
from tests.contract.test_grid import check
from tests.kernels.conftest import INTERPRET

# An empty batch and a single pair, which test_contract.py has, would let restrictions go untested.
OWN = {"dtype": ["f32", "f32", "bf16", "f16"], "blocks": [None], "batch": [1, 1, 3]}
SLOW_LENGTHS = [x for x in FACTORS["lengths"] if x not in ((1, 1), (1000, 1000))]
LONGEST = Case(lengths=(1000, 1000), heads=(1, 1), restriction="combination")
FAST_CASES = pairwise(
    FAST_FACTORS | OWN | {"lengths": [(1, 300), (128, 128), (200, 130)], "heads": [(1, 1), (6, 2), (4, 1)]},
    count=len(RESTRICTIONS) // 4,
    cost=2e7,
    seed=2,
)
# The last choice of parameters has arrays wherever the normaliser takes them.
LAST = dict(case.normalizer for case in NORMALIZER_CASES)
FEW = {case.restriction for case in FAST_CASES}
MANY = pairwise(FACTORS | OWN | {"lengths": SLOW_LENGTHS}, count=len(RESTRICTIONS), cost=4e7, seed=3)
SLOW_CASES = [LONGEST, *(case for case in MANY if case.restriction not in FEW)]


def test_every_restriction_reaches_the_kernels():
    cases = [*FAST_CASES, *SLOW_CASES]
    assert {case.restriction for case in cases} == set(RESTRICTIONS)
    assert all(case.batch for case in cases)
    assert {case.lengths for case in SLOW_CASES} == {*SLOW_LENGTHS, LONGEST.lengths}
    assert len(FEW) == len(FAST_CASES)


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
