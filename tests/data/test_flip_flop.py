"""Answers against a loop with one bit of memory."""

import jax
import numpy as np
import pytest

from attnorm.data.flip_flop import (
    IGNORE,
    ONE,
    READ,
    WRITE,
    ZERO,
    flip_flop_batch,
    flip_flop_chance,
    flip_flop_right,
)


@pytest.fixture(scope="module")
def questions():
    return jax.tree.map(np.asarray, flip_flop_batch(jax.random.key(0), 300, 24, ignore=0.5))


def test_reads_give_the_bit_of_the_last_write(questions):
    for inputs, answers, is_asked, source in zip(*questions, strict=True):
        assert inputs[0] == WRITE and inputs[22] == READ
        for position in range(0, 24, 2):
            kind, bit = inputs[position : position + 2]
            assert kind in (WRITE, READ, IGNORE) and bit in (ZERO, ONE)
            if kind == WRITE:
                memory, written = bit, position + 1
            assert is_asked[position] == (kind == READ) and not is_asked[position + 1]
            if kind == READ:
                assert answers[position] == bit == memory and source[position] == written
            else:
                assert source[position] == -1


def test_the_bits_of_the_last_write_and_of_reads_since_are_right(questions):
    is_right = np.asarray(flip_flop_right(jax.tree.map(jax.numpy.asarray, questions)))
    for inputs, is_asked, right in zip(questions.inputs[:50], questions.is_asked, is_right, strict=False):
        since = []
        for position in range(0, 24, 2):
            if is_asked[position]:
                assert np.flatnonzero(right[position]).tolist() == since
            else:
                assert not right[position].any()
            if inputs[position] == WRITE:
                since = []
            if inputs[position] != IGNORE:
                since = [*since, position + 1]
        assert not right[1::2].any()
    assert is_right.sum(axis=-1).max() > 2  # some reads have reads before them


def test_instructions_are_as_frequent_as_asked_for(questions):
    inner = questions.inputs[:, 2:22:2]
    frequency = [np.mean(inner == kind) for kind in (IGNORE, WRITE, READ)]
    np.testing.assert_allclose(frequency, [0.5, 0.25, 0.25], atol=0.03)


def test_bits_are_fair_so_that_a_guess_is_right_every_other_time(questions):
    answers = questions.answers[questions.is_asked]
    np.testing.assert_allclose(np.mean(answers == ONE), flip_flop_chance(), atol=0.06)


@pytest.mark.parametrize(("length", "ignore"), [(7, 0.8), (2, 0.8), (8, 1.5)])
def test_what_is_out_of_range_is_refused(length, ignore):
    with pytest.raises(ValueError, match="length must be even|ignore must be in"):
        flip_flop_batch(jax.random.key(0), 2, length, ignore=ignore)
