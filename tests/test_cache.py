"""The cache: which token is in which slot, and what does not fit."""

import jax
import numpy as np
import pytest

from attnorm import make_cache

SIZES = dict(num_layers=2, batch_size=2, num_key_value_heads=1, head_dim=1)


def fill(cache, layer, counts, tokens_at_once):
    """The cache after rows of that many tokens, where the token at position p is p + 1."""
    for start in range(0, max(counts), tokens_at_once):
        new = np.clip(np.array(counts) - start, 0, tokens_at_once)
        numbers = np.arange(start, start + tokens_at_once)[None, :, None, None] + np.ones((2, 1, 1, 1))
        cache = cache.append(layer, numbers, -numbers, new).advance(new)
    return cache


def test_slots_without_a_window():
    cache = fill(make_cache(**SIZES, num_slots=5), 1, [4, 2], tokens_at_once=3)
    np.testing.assert_array_equal(cache.key[1, ..., 0, 0], [[1, 2, 3, 4, 0], [1, 2, 0, 0, 0]])
    np.testing.assert_array_equal(cache.value, -cache.key)
    np.testing.assert_array_equal(cache.key[0], 0)
    np.testing.assert_array_equal(cache.lengths, [4, 2])


def test_slots_of_a_window():
    cache = fill(make_cache(**SIZES, num_slots=5, window=2), 0, [9, 6], tokens_at_once=3)
    np.testing.assert_array_equal(cache.key[0, ..., 0, 0], [[6, 7, 8, 9, 5], [6, 2, 3, 4, 5]])
    assert cache.longest_chunk == 3 and cache.max_length is None


def test_tokens_beyond_the_last_slot_are_dropped():
    cache = fill(make_cache(**SIZES, num_slots=3), 0, [5, 2], tokens_at_once=2)
    np.testing.assert_array_equal(cache.key[0, ..., 0, 0], [[1, 2, 3], [1, 2, 0]])
    np.testing.assert_array_equal(cache.lengths, [5, 2])


def test_room():
    cache = make_cache(**SIZES, num_slots=5).advance(np.array([4, 1]))
    cache.check_room(1, 1)
    cache.check_room(np.array([1, 4]), 4)
    with pytest.raises(ValueError, match="rows may have max_length = 5 tokens, row 0 has 4 and would have 6"):
        cache.check_room(2, 2)
    with pytest.raises(ValueError, match="row 1 has 1 and would have 6"):
        cache.check_room(np.array([0, 5]), 5)
    with pytest.raises(ValueError, match="at most 5 can be appended at once to a cache of 5 slots, got 6"):
        jax.eval_shape(lambda cache: cache.check_room(6, 6), cache)
    jax.eval_shape(lambda cache: cache.check_room(5, 5), cache)  # traced lengths are not known
    ring = make_cache(**SIZES, num_slots=5, window=3).advance(1000)
    ring.check_room(2, 2)
    with pytest.raises(ValueError, match="at most 2 .* 5 slots with a window of 3, got 3"):
        ring.check_room(3, 3)


@pytest.mark.parametrize(
    "error, options, message",
    [
        (ValueError, {"num_slots": 0}, "num_slots must be at least 1, got 0"),
        (TypeError, {"num_slots": 4.0}, "num_slots must be an int, got 4.0"),
        (ValueError, {"head_dim": -1}, "head_dim must be at least 1, got -1"),
        (ValueError, {"window": 4}, "num_slots must be greater than window = 4, got 4"),
        (ValueError, {"window": -1}, "window must be at least 0, got -1"),
        (ValueError, {"max_length": 5}, "max_length must be at most num_slots = 4 without a window, got 5"),
        (ValueError, {"window": 2, "max_length": 0}, "max_length must be at least 1, got 0"),
    ],
)
def test_sizes_that_cannot_be(error, options, message):
    with pytest.raises(error, match=message):
        make_cache(**SIZES | {"num_slots": 4} | options)
