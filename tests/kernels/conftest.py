"""The kernel under test, in interpret mode."""

import functools

import pytest

import attnorm
from attnorm import kernels

SMALL = kernels.BlockSizes(128, 128)
INTERPRET = kernels.Config(forward=SMALL, backward=SMALL, interpret=True)


@pytest.fixture
def attend():
    """`attnorm.dot_product_attention` by the TPU kernels, interpreted, at full precision."""
    with kernels.config(INTERPRET):
        yield functools.partial(
            attnorm.dot_product_attention, implementation="pallas_tpu", precision="highest"
        )
