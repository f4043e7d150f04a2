"""Whole sequences against plain Python."""

import collections
import itertools

import jax
import numpy as np
import pytest

from attnorm.data.sort import sort_batch, sort_chance


def test_inputs_are_symbols_separator_and_answers():
    batch = sort_batch(jax.random.key(0), 60, 6, vocab_size=5, shortest=3)
    seen = set()
    for inputs, answers, is_asked, source in zip(*jax.tree.map(np.asarray, batch), strict=True):
        size = inputs.tolist().index(5)
        seen.add(size)
        symbols = inputs[:size].tolist()
        wanted = sorted(symbols)
        assert is_asked.tolist() == [size <= position < 2 * size for position in range(12)]
        assert answers[is_asked].tolist() == wanted
        assert inputs[size : 2 * size].tolist() == [5, *wanted[:-1]]
        assert sorted(source[is_asked]) == list(range(size))
        assert inputs[source[is_asked]].tolist() == wanted
    assert seen == {3, 4, 5, 6}


@pytest.mark.parametrize(("length", "vocab_size"), [(1, 3), (4, 2), (5, 3), (3, 4)])
def test_chance_is_the_share_of_the_most_frequent_answer(length, vocab_size):
    answers = collections.Counter(
        tuple(sorted(symbols)) for symbols in itertools.product(range(vocab_size), repeat=length)
    )
    share = max(answers.values()) / vocab_size**length
    np.testing.assert_allclose(sort_chance(length, vocab_size), share, rtol=1e-12)
