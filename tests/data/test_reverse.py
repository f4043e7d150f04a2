"""Whole sequences against plain Python."""

import jax
import numpy as np

from attnorm.data.reverse import reverse_batch


def test_inputs_are_symbols_separator_and_answers():
    batch = reverse_batch(jax.random.key(0), 60, 6, vocab_size=5, shortest=3)
    seen = set()
    for inputs, answers, is_asked, source in zip(*jax.tree.map(np.asarray, batch), strict=True):
        size = inputs.tolist().index(5)
        seen.add(size)
        symbols = inputs[:size].tolist()
        wanted = symbols[::-1]
        assert is_asked.tolist() == [size <= position < 2 * size for position in range(12)]
        assert answers[is_asked].tolist() == wanted
        assert inputs[size : 2 * size].tolist() == [5, *wanted[:-1]]
        assert sorted(source[is_asked]) == list(range(size))
        assert inputs[source[is_asked]].tolist() == wanted
    assert seen == {3, 4, 5, 6}
