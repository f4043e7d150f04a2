"""Values and masks that hypothesis thinks up, on the kernels, interpreted."""

import pytest

from attnorm import kernels
from tests.contract.test_random import check
from tests.kernels.conftest import INTERPRET

pytestmark = pytest.mark.slow


def test_on_a_tpu():
    with kernels.config(INTERPRET):
        check("pallas_tpu")


def test_on_a_gpu():
    with kernels.config(kernels.Config(gpu="portable", interpret=True)):
        check("pallas_gpu")
