"""Answers against a search in plain Python."""

import jax
import numpy as np
import pytest

from attnorm.data.max_retrieval import max_retrieval_batch, max_retrieval_chance


@pytest.fixture(scope="module")
def questions():
    questions = max_retrieval_batch(jax.random.key(0), 400, 6, num_classes=3, shortest=2)
    return jax.tree.map(np.asarray, questions)


def test_the_answer_is_the_class_of_the_largest_priority_before_the_query(questions):
    for inputs, answers, is_asked, source in zip(*questions, strict=True):
        (query,) = np.flatnonzero(inputs[:, 4])
        assert is_asked.tolist() == [position == query for position in range(7)]
        assert inputs[query].tolist() == [0, 0, 0, 0, 1]
        items = inputs[:query]
        assert (items[:, :3].sum(axis=1) == 1).all() and ((items[:, 3] >= 0) & (items[:, 3] < 1)).all()
        largest = max(range(query), key=lambda position: items[position, 3])
        assert source[query] == largest
        assert items[largest, answers[query]] == 1


def test_the_number_of_items_is_uniform(questions):
    sizes = np.argmax(questions.is_asked, axis=1)
    np.testing.assert_allclose(np.bincount(sizes, minlength=7) / 400, [0, 0, *[0.2] * 5], atol=0.06)


def test_chance_is_the_accuracy_of_a_constant(questions):
    answers = questions.answers[questions.is_asked]
    np.testing.assert_allclose(np.mean(answers == 1), max_retrieval_chance(num_classes=3), atol=0.06)


def test_sizes_that_are_not_in_order_are_refused():
    with pytest.raises(ValueError, match="shortest must be from 1 to length = 4, got 5"):
        max_retrieval_batch(jax.random.key(0), 2, 4, shortest=5)
