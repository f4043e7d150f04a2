"""Answers against a dictionary; places and chance against their formulas."""

import jax
import numpy as np
import pytest

from attnorm.data.mqar import mqar_batch, mqar_chance


@pytest.fixture(scope="module")
def questions():
    return jax.tree.map(np.asarray, mqar_batch(jax.random.key(0), 2000, 14, num_pairs=3, vocab_size=8))


def test_each_key_is_asked_once_and_the_answer_is_its_value(questions):
    for inputs, answers, is_asked, source in zip(*(x[:100] for x in questions), strict=True):
        keys, values = inputs[:6:2], inputs[1:6:2]
        assert len(set(keys)) == len(set(values)) == 3
        assert (keys < 4).all() and ((values >= 4) & (values < 8)).all()
        value_of = dict(zip(keys, values, strict=True))
        assert sorted(inputs[is_asked]) == sorted(keys) and not is_asked[:6].any()
        assert [value_of[key] for key in inputs[is_asked]] == answers[is_asked].tolist()
        assert inputs[source[is_asked] - 1].tolist() == inputs[is_asked].tolist()
        assert (inputs[6:][~is_asked[6:]] == 8).all() and not is_asked[1::2].any()


def test_near_places_are_as_frequent_as_the_power_law_says():
    questions = mqar_batch(jax.random.key(1), 4000, 12, num_pairs=1, vocab_size=4)
    frequency = np.mean(np.asarray(questions.is_asked), axis=0)
    law = np.arange(1, 6) ** -0.99
    np.testing.assert_allclose(frequency[2::2], law / law.sum(), atol=0.03)


def test_chance_is_the_accuracy_of_one_of_the_values(questions):
    inputs, answers, is_asked, _ = questions
    guesses = np.random.default_rng(0).choice([1, 3, 5], size=answers.shape)
    is_right = np.take_along_axis(inputs, guesses, axis=1) == answers
    np.testing.assert_allclose(np.mean(is_right[is_asked]), mqar_chance(3), atol=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 11, "num_pairs": 3}, "length must be at least 4 num_pairs = 12, got 11"),
        ({"length": 80, "num_pairs": 9}, "num_pairs must be from 1 to vocab_size / 2 = 8, got 9"),
    ],
)
def test_what_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        mqar_batch(jax.random.key(0), 2, vocab_size=16, **options)
