"""What rules are told of where logits stand: positions, distances and numbers of visible keys."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm import masks
from attnorm.arguments import checked_call
from attnorm.normalizers.rule import Place
from attnorm.places import dense_place, tile_place
from tests.contract.cases import RESTRICTIONS, Case, restrict
from tests.oracles import visible_keys

B, N, T, S = 3, 2, 21, 34


def visibility(normalizer="scale_invariant", **options):
    names = set(inspect.signature(checked_call).parameters) - {"query", "key", "value"}
    defaults = dict.fromkeys(names) | {"is_causal": False, "query_offset": 0}
    arrays = (np.zeros((B, length, N, 4), np.float32) for length in (T, S, S))
    return checked_call(*arrays, **defaults | options | {"normalizer": normalizer}).visibility


@pytest.mark.parametrize("restriction", [x for x in RESTRICTIONS if x != "own-segments"])
def test_counts_are_the_sums_of_the_mask(restriction, monkeypatch):
    monkeypatch.setattr(masks, "_COUNTED_AT_ONCE", 8)
    case = Case(lengths=(T, S), heads=(N, 1), batch=B, restriction=restriction)
    options = restrict(case, np.random.default_rng(0))
    for name in ("bias", "logits_soft_cap", "scale"):
        options.pop(name, None)
    expected = visible_keys((B, N, T, S), **options).sum(-1)
    got = visibility(**options).counts()
    np.testing.assert_array_equal(np.broadcast_to(got, (B, N, T)), expected)


def test_counts_beyond_every_index():
    far, i = 2**30 - 2, np.arange(T)
    for options, expected in (
        ({"is_causal": True, "query_offset": far}, S),
        ({"is_causal": True, "query_offset": -far}, 0),
        ({"local_window_size": (far, far), "query_offset": far}, S - i),
        ({"local_window_size": (far, far), "query_offset": -far}, i + 1),
        ({"local_window_size": (3, far), "query_offset": far}, 0),
    ):
        counts = visibility(**options).counts()
        np.testing.assert_array_equal(counts, np.broadcast_to(expected, counts.shape), str(options))


def test_places_of_a_tile_are_those_of_the_whole():
    rule = attnorm.get_normalizer("scale_invariant")
    object.__setattr__(rule, "needs", frozenset({"position", "count", "distance"}))
    seen = visibility(is_causal=True, query_offset=np.array([3, 0, -2]))
    whole = jax.tree.map(np.asarray, dense_place(rule, seen, jnp.float32))
    i = np.arange(T)[:, None] + np.array([3, 0, -2])[:, None, None, None]
    np.testing.assert_array_equal(whole.position, i)
    np.testing.assert_array_equal(whole.distance, i - np.arange(S))
    np.testing.assert_array_equal(whole.count, np.clip(i + 1, 1, S))
    counts = seen.counts()[:, :, None, 4:9, None]
    tile = tile_place(rule, seen, counts, 4, 5, 10, 7, jnp.float32)
    np.testing.assert_array_equal(tile.position[:, :, 0], whole.position[..., 4:9, :])
    np.testing.assert_array_equal(tile.count[:, :, 0], whole.count[..., 4:9, :])
    np.testing.assert_array_equal(tile.distance[:, :, 0], whole.distance[..., 4:9, 10:17])


def test_rules_that_ask_for_nothing_are_told_nothing():
    rule = attnorm.get_normalizer("l2")
    assert not jax.tree.leaves(dense_place(rule, visibility(), jnp.float32))
    assert dense_place(rule, None, None) == Place()  # nor is anything computed for them
    assert visibility("l2", query_offset=5).offset is None
    assert visibility("alibi", query_offset=5).offset is not None
    assert visibility("alibi", query_offset=5).dense() is None


def test_some_queries_are_told_what_they_are_told_among_all():
    """Of 21 queries, 8 at a time: what they see, how many keys they count, and where they stand."""
    case = Case(lengths=(T, S), heads=(N, 1), batch=B, restriction="combination")
    options = restrict(case, np.random.default_rng(0))
    for name in ("bias", "logits_soft_cap", "scale"):
        options.pop(name)
    whole = visibility(**options)
    counted = whole.counting(jnp.asarray(np.random.default_rng(1).random((B, 1, T, S)) < 0.5))
    padded, rule = counted.padded(24, S), attnorm.get_normalizer("ssmax")
    object.__setattr__(rule, "needs", frozenset({"position", "count", "distance"}))
    expected = dense_place(rule, counted, jnp.float32)
    for start in (0, 8, 16):
        rows, stop = padded.from_row(start, 8), min(start + 8, T)
        seen = np.broadcast_to(rows.dense(), (B, N, 8, S))
        np.testing.assert_array_equal(
            seen[:, :, : stop - start], np.broadcast_to(whole.dense(), (B, N, T, S))[:, :, start:stop]
        )
        assert not seen[:, :, stop - start :].any()
        got = dense_place(rule, rows, jnp.float32)
        for part in ("position", "count", "distance"):
            a, b = getattr(got, part), getattr(expected, part)
            np.testing.assert_array_equal(a[:, :, : stop - start], b[:, :, start:stop])
