"""The implementations under test."""

import functools

import pytest

import attnorm
from attnorm import chunked
from tests.contract.cases import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def attend(request, monkeypatch):
    """`attnorm.dot_product_attention` by one named implementation, at full precision.

    Tiles are small, so that even short sequences have several, the last of them partly filled.
    """
    blocks = chunked.BlockSizes(query=16, key=24)
    monkeypatch.setattr(chunked, "default_block_sizes", lambda *lengths: blocks)
    return functools.partial(attnorm.dot_product_attention, implementation=request.param, precision="highest")
