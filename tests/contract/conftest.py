"""The implementations under test."""

import functools

import pytest

import attnorm
from attnorm import chunked
from tests.contract.cases import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request):
    """`attnorm.dot_product_attention` by one named implementation, at full precision.

    Tiles are small, so that even short sequences have several, the last of them partly filled.
    """
    with chunked.block_sizes(chunked.BlockSizes(query=16, key=24)):
        yield functools.partial(
            attnorm.dot_product_attention, implementation=request.param, precision="highest"
        )
