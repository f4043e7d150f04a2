"""Diagnostics of an attention whose weights are known."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from attnorm import get_normalizer
from attnorm.lengthbench.diagnostics import diagnose

LENGTH = 4


def fake_task(query, key, value, source):
    """One sequence; a batch is the position from which on it asks."""

    def apply(params, model_state, batch, attention, tap):
        tap(2 * attention(query, key, value, is_causal=True, scale=1.0))

    def questions(batch):
        is_asked = jnp.arange(LENGTH)[None] >= batch
        is_right = jnp.zeros((1, LENGTH, LENGTH), bool)
        if source is not None:
            is_right = is_right.at[0, :, source].set(True)
        return is_asked, is_right

    return SimpleNamespace(apply=apply, questions=questions)


def diagnosed(task, normalizer, first_asked=(LENGTH - 1,)):
    def draw(index):
        return jnp.array(first_asked)[index], jnp.array([LENGTH])

    return diagnose(task, None, None, get_normalizer(normalizer), draw, len(first_asked), 1)


@pytest.mark.parametrize(("normalizer", "norm"), [("softmax", 0.5), ("l2", 1.0)])
def test_equal_logits_read_all_keys(normalizer, norm):
    value = jnp.arange(8.0).reshape(1, LENGTH, 1, 2)
    task = fake_task(jnp.zeros((1, LENGTH, 1, 2)), value, value, source=1)
    got = diagnosed(task, normalizer)
    out = norm * np.sum(np.arange(8.0).reshape(4, 2), axis=0)
    wanted = {
        "effective_keys": 4,
        "weight_norm": norm,
        "output_norm": np.linalg.norm(out),
        "output_variance": np.var(out),
        "right_share": 0.25,
    }
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-5, err_msg=name)


def test_the_right_share_is_that_of_the_best_head_and_the_others_are_means():
    # Head 0 sees the logits (ln 3, 0, 0, 0), head 1 equal ones.
    query = jnp.zeros((1, LENGTH, 2, 1)).at[..., 0, 0].set(1.0)
    key = jnp.zeros((1, LENGTH, 2, 1)).at[0, 0, 0, 0].set(np.log(3))
    task = fake_task(query, key, jnp.ones((1, LENGTH, 2, 1)), source=0)
    got = diagnosed(task, "softmax")
    np.testing.assert_allclose(got["right_share"], 0.5, rtol=1e-5)
    first = np.array([3, 1, 1, 1]) / 6
    np.testing.assert_allclose(got["effective_keys"], (1 / np.sum(first**2) + 4) / 2, rtol=1e-5)


def test_questions_of_all_batches_count_alike():
    task = fake_task(*(jnp.zeros((1, LENGTH, 1, 2)),) * 3, source=0)
    # Equal logits: a question at position t reads t + 1 keys. The batches have one question and three.
    got = diagnosed(task, "softmax", first_asked=(3, 1))
    np.testing.assert_allclose(got["effective_keys"], (4 + 2 + 3 + 4) / 4, rtol=1e-5)
    np.testing.assert_allclose(got["right_share"], (1 / 4 + 1 / 2 + 1 / 3 + 1 / 4) / 4, rtol=1e-5)


def test_without_right_keys_there_is_no_share_of_them():
    got = diagnosed(fake_task(*(jnp.zeros((1, LENGTH, 1, 2)),) * 3, source=None), "softmax")
    assert np.isnan(got["right_share"]) and got["effective_keys"] == 4
