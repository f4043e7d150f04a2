"""Sequences taken apart in plain Python."""

import jax
import numpy as np
import pytest

from attnorm.data.passkey import ASK, FIRST_FILLER, KEY, VOCAB_SIZE, passkey_batch, passkey_chance


def places(questions, length, num_digits):
    """Checks every sequence, and returns where its key is."""
    found = []
    for inputs, answers, is_asked, source in zip(*jax.tree.map(np.asarray, questions), strict=True):
        inputs = inputs.tolist()
        key, ask = inputs.index(KEY), inputs.index(ASK)
        digits = inputs[key + 1 : key + 1 + num_digits]
        assert all(0 <= digit <= 9 for digit in digits)
        assert ask == length - num_digits and inputs[ask + 1 :] == digits[:-1]
        fillers = inputs[:key] + inputs[key + 1 + num_digits : ask]
        assert all(FIRST_FILLER <= filler < VOCAB_SIZE for filler in fillers)
        assert is_asked.tolist() == [position >= ask for position in range(length)]
        assert answers[ask:].tolist() == digits
        assert source[ask:].tolist() == list(range(key + 1, key + 1 + num_digits))
        found.append(key)
    return found


def test_answers_are_the_digits_after_the_key_wherever_it_stands():
    questions = passkey_batch(jax.random.key(0), 500, 16, num_digits=3)
    np.testing.assert_allclose(np.bincount(places(questions, 16, 3)) / 500, [0.1] * 10, atol=0.06)
    # The accuracy of a constant.
    digits = np.asarray(questions.answers)[np.asarray(questions.is_asked)]
    np.testing.assert_allclose(np.mean(digits == 7), passkey_chance(), atol=0.03)


@pytest.mark.parametrize(("depth", "place"), [(0.0, 0), (0.5, 4), (1.0, 9)])
def test_depth_is_where_the_key_stands(depth, place):
    questions = passkey_batch(jax.random.key(1), 500, 16, num_digits=3, depth=depth)
    assert set(places(questions, 16, 3)) == {place}


@pytest.mark.parametrize(("length", "depth"), [(6, 0.0), (12, 1.5)])
def test_what_is_out_of_range_is_refused(length, depth):
    with pytest.raises(ValueError, match="length must be at least 2 num_digits|depth must be None or in"):
        passkey_batch(jax.random.key(0), 2, length, num_digits=3, depth=depth)
