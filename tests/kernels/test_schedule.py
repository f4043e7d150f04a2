"""Which tiles are computed, masked and fetched, against the dense mask."""

import jax
import numpy as np
import pytest

from attnorm.kernels.schedule import Tiling, make_bounds, make_schedule
from attnorm.masks import Visibility

B, T, S = 2, 70, 90
TILING = Tiling(T=T, S=S, bq=16, bk=32)
WHOLE = Tiling(T=64, S=96, bq=16, bk=32)


def ids(*lengths):
    return np.repeat(np.arange(len(lengths)), lengths)[None].repeat(B, 0).astype(np.int32)


RESTRICTIONS = {
    "none": {},
    "causal": dict(right=0),
    "causal, offset": dict(right=0, offset=np.int32(-9)),
    "causal, offset per batch": dict(right=0, offset=np.array([40, -5], np.int32)),
    "window": dict(left=20, right=7),
    "window to the left": dict(left=3),
    "window far away": dict(left=4, right=4, offset=np.int32(500)),
    "lengths": dict(
        query_lengths=np.array([33, 0], np.int32), key_lengths=np.array([0, 64], np.int32), right=0
    ),
    "segments": dict(query_segment_ids=ids(5, 20, 0, 45), key_segment_ids=ids(30, 2, 40, 18)),
    "ids that come back": dict(
        query_segment_ids=ids(20, 20, 30) % 2, key_segment_ids=ids(30, 30, 30) % 2, left=60
    ),
}


def make_visibility(tiling, options):
    cut = {"query_segment_ids": tiling.T, "key_segment_ids": tiling.S}
    options = {k: x[:, : cut[k]] if k in cut else x for k, x in options.items()}
    return Visibility(num_queries=tiling.T, num_keys=tiling.S, **options)


def pad(ids, length):
    return None if ids is None else np.pad(ids, [(0, 0), (0, length - ids.shape[1])], mode="edge")


@pytest.mark.parametrize("keys_outer", [False, True])
@pytest.mark.parametrize("name", RESTRICTIONS)
@pytest.mark.parametrize("tiling", [TILING, WHOLE], ids=["padded", "whole"])
def test_tiles_against_the_dense_mask(tiling, name, keys_outer):
    options = dict(RESTRICTIONS[name])
    if tiling is WHOLE and "segment" in str(options):
        options = {
            k: pad(x[:, :64], 64 if k[0] == "q" else 96) if "ids" in k else x for k, x in options.items()
        }
    visibility = make_visibility(tiling, options)
    length, width = tiling.nq * tiling.bq, tiling.nk * tiling.bk
    dense = np.zeros((B, length, width), bool)
    mask = visibility.tile(0, tiling.T, 0, tiling.S)
    dense[:, : tiling.T, : tiling.S] = np.broadcast_to(mask, (B, 1, tiling.T, tiling.S))[:, 0]
    tiles = dense.reshape(B, tiling.nq, tiling.bq, tiling.nk, tiling.bk)
    some, every = tiles.any((2, 4)), tiles.all((2, 4))
    if keys_outer:
        some, every = some.swapaxes(1, 2), every.swapaxes(1, 2)

    padded = Visibility(
        num_queries=tiling.T,
        num_keys=tiling.S,
        **options
        | {
            k: pad(options[k], n)
            for k, n in (("query_segment_ids", length), ("key_segment_ids", width))
            if k in options
        },
    )
    schedule, tables = make_schedule(padded, tiling, make_bounds(padded, tiling), keys_outer=keys_outer)
    tables = jax.tree.map(np.asarray, tables)
    index = np.ndindex(*some.shape)
    needed, full, fetched = (np.zeros(some.shape, int) for _ in range(3))
    for at in index:
        needed[at] = schedule.needed(tables, *at)
        full[at] = schedule.full(tables, *at)
        fetched[at] = schedule.fetch(tables, *at)

    assert not (some & (needed == 0)).any(), "a tile with a visible pair is skipped"
    assert not ((full == 1) & ~every).any(), "a tile with a hidden pair is not masked"
    if "segment" not in str(options):
        np.testing.assert_array_equal(needed, some)
        np.testing.assert_array_equal(full & needed, every)
    elif name == "segments":
        assert needed.sum() < needed.size, "nothing is skipped"
    inner = np.broadcast_to(np.arange(some.shape[2]), some.shape)
    np.testing.assert_array_equal(fetched[needed == 1], inner[needed == 1])
    assert (0 <= fetched).all() and (fetched < some.shape[2]).all()
    for b in range(B):
        # Between two needed tiles, what is fetched is the second: one DMA for each, ahead of time.
        order = [(outer, x) for outer in range(some.shape[1]) for x in range(some.shape[2])]
        following = None
        for outer, x in reversed(order):
            if needed[b, outer, x]:
                following = x
            elif following is not None and "ids" not in str(options) and _follows(needed[b], outer):
                assert fetched[b, outer, x] == following


def _follows(needed, outer):
    """Whether this outer tile and the next one need something."""
    return needed[outer].any() and needed[min(outer + 1, len(needed) - 1)].any()


def test_a_chunk_of_queries_has_the_bounds_of_its_place():
    visibility = Visibility(num_queries=T, num_keys=S, right=0, query_lengths=np.array([50, 60], np.int32))
    bounds = make_bounds(visibility, Tiling(T=32, S=S, bq=16, bk=32), first_query=np.int32(32))
    np.testing.assert_array_equal(bounds.offset, [32])
    np.testing.assert_array_equal(bounds.query_limit, [18, 28])
    np.testing.assert_array_equal(bounds.key_limit, [S])
