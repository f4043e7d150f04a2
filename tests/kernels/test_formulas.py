"""Every rule with a published formula that the kernels serve, with all its parameters, over several tiles each way."""

import pytest

from attnorm import kernels
from tests.contract.test_formulas import CHOICES, Shape, check, shown
from tests.kernels.conftest import INTERPRET
from tests.kernels.features import is_served

# Two tiles of queries and three of keys on a TPU, more on a GPU.
SHAPE = Shape(B=1, T=140, S=300, N=2, K=1)
KERNELS = {"pallas_tpu": INTERPRET, "pallas_gpu": kernels.Config(gpu="portable", interpret=True)}


@pytest.mark.slow
@pytest.mark.parametrize("choice", [k for k, choice in enumerate(CHOICES) if is_served(*choice)], ids=shown)
def test_formula(choice):
    for implementation, config in KERNELS.items():
        with kernels.config(config):
            check(choice, implementation, SHAPE)
