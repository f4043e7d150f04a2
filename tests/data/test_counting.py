"""Labels against counting in plain Python; the floor against simulation."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm.data.counting import counting_batch, position_only_mse


def test_counts_are_how_often_the_first_symbol_occurs_after_position_0():
    tokens, counts = counting_batch(jax.random.key(3), batch_size=7, length=40, vocab_size=4)
    for sequence, labels in zip(np.asarray(tokens).tolist(), np.asarray(counts).tolist(), strict=True):
        assert labels == [sequence[1 : t + 1].count(sequence[0]) for t in range(40)]


def test_symbols_are_uniform_and_independent_of_position():
    tokens, _ = counting_batch(jax.random.key(0), batch_size=20_000, length=3, vocab_size=4)
    for position in range(3):
        frequency = np.bincount(tokens[:, position], minlength=4) / 20_000
        np.testing.assert_allclose(frequency, 0.25, atol=0.015)


def test_batches_of_different_keys_differ():
    first, second = (counting_batch(jax.random.key(seed), 4, 32, 16)[0] for seed in (0, 1))
    assert jnp.mean(first == second) < 0.3


@pytest.mark.parametrize("vocab_size", [4, 16])
def test_floor_is_the_error_of_the_mean_count(vocab_size):
    _, counts = counting_batch(jax.random.key(1), batch_size=20_000, length=64, vocab_size=vocab_size)
    squared_errors = np.mean((np.asarray(counts) - np.arange(64) / vocab_size) ** 2, axis=0)
    for prefix in (2, 16, 64):
        simulated = np.mean(squared_errors[:prefix])
        np.testing.assert_allclose(position_only_mse(prefix, vocab_size), simulated, rtol=0.05)
    assert position_only_mse(1, vocab_size) == 0
