"""The implementations under test."""

import functools

import pytest

import attnorm
from attnorm import chunked


@pytest.fixture(params=["reference", "chunked", "chunked-small-tiles"])
def attend(request, monkeypatch):
    """`attnorm.dot_product_attention` by one named implementation, at full precision."""
    implementation, _, tiles = request.param.partition("-")
    if tiles:
        blocks = chunked.BlockSizes(query=16, key=24)
        monkeypatch.setattr(chunked, "default_block_sizes", lambda *lengths: blocks)
    return functools.partial(
        attnorm.dot_product_attention, implementation=implementation, precision="highest"
    )
