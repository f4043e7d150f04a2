"""Windows against the text that they are from."""

import jax
import numpy as np
import pytest

from attnorm.data.text import python_manual, split_corpus
from attnorm.data.text_windows import text_batch, text_chance


@pytest.mark.parametrize(("held_out", "first_asked"), [(False, 0), (True, 20)])
def test_windows_are_of_their_side_of_the_text_and_ask_for_the_next_byte(held_out, first_asked):
    side = split_corpus(python_manual(), 0.2)[held_out]
    text = b"\xff" + b"\xff".join(document.encode() for document in side.values()) + b"\xff"
    questions = jax.tree.map(np.asarray, text_batch(jax.random.key(0), 50, 40, held_out=held_out))
    for inputs, answers in zip(questions.inputs, questions.answers, strict=True):
        window = bytes(min(token, 255) for token in [*inputs, answers[-1]])  # 256 ends a document
        assert window in text
        np.testing.assert_array_equal(inputs[1:], answers[:-1])
    assert len({row.tobytes() for row in questions.inputs}) > 45
    np.testing.assert_array_equal(questions.is_asked, np.tile(np.arange(40) >= first_asked, (50, 1)))


def test_chance_is_the_loss_of_the_frequencies_of_bytes():
    text = b"".join(document.encode() for document in split_corpus(python_manual(), 0.2)[1].values())
    frequencies = np.bincount(np.frombuffer(text, np.uint8)) / len(text)
    loss = -np.sum(frequencies * np.log(np.where(frequencies > 0, frequencies, 1)))
    assert text_chance() == pytest.approx(loss, abs=0.01)  # ends of documents count there


def test_a_length_that_the_text_does_not_have_is_refused():
    with pytest.raises(ValueError, match="length must be from 2 to .*got 10000000"):
        text_batch(jax.random.key(0), 1, 10**7)
