"""Metrics of given predictions against NumPy, right keys against a loop, and what padding changes: nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm import dot_product_attention
from attnorm.data.counting import counting_batch, position_only_mse
from attnorm.lengthbench.contenders import parse_contender
from attnorm.lengthbench.evaluation import buckets, draw_padded, num_sequences
from attnorm.lengthbench.suites import MAIN, SUITES
from attnorm.lengthbench.tasks import TASKS

TINY = SUITES["tiny"]


def make_task(name):
    return TASKS[name]("tiny").make(parse_contender("softmax", ()), TINY)


@pytest.fixture(scope="module")
def flip_flop():
    return make_task("flip_flop")


def test_losses_and_metrics_are_of_the_questions_alone(flip_flop, monkeypatch):
    batch = flip_flop.eval_draw(jax.random.key(0), 6, 8, "dense")
    logits = 3 * np.random.default_rng(0).normal(size=(6, 8, 5)).astype(np.float32)
    logits[0, np.arange(8), np.asarray(batch.answers)[0]] = 20.0  # one sequence has all right
    monkeypatch.setattr(flip_flop, "apply", lambda *args: jnp.asarray(logits))

    shifted = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    loss, right, exact, asked = 0.0, 0, 0, 0
    for b in range(6):
        all_right = True
        for t in np.flatnonzero(np.asarray(batch.is_asked[b])):
            answer = int(batch.answers[b, t])
            loss -= shifted[b, t, answer]
            is_right = int(np.argmax(logits[b, t])) == answer
            right, asked, all_right = right + is_right, asked + 1, all_right and is_right
        exact += all_right

    total, (count, _) = flip_flop.loss(None, (), batch, None)
    np.testing.assert_allclose([total, count], [loss, asked], rtol=1e-5)
    values = flip_flop.per_sequence(None, (), batch, jnp.full(6, 8), None)
    metrics = flip_flop.summarize({name: jnp.mean(x) for name, x in values.items()}, 8)
    wanted = {
        "loss": loss / asked,
        "accuracy": right / asked,
        "error": 1 - right / asked,
        "exact": exact / 6,
    }
    assert 0 < right < asked and exact >= 1
    for name, value in wanted.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)


def test_the_right_keys_of_counting_are_those_that_are_counted():
    task = make_task("counting")
    tokens, counts = counting_batch(jax.random.key(0), 3, 12, 3)
    is_asked, is_right = task.questions((tokens, counts))
    np.testing.assert_array_equal(np.sum(is_right, axis=-1), counts)
    np.testing.assert_array_equal(is_asked, counts > 0)
    for b in range(3):
        for t in range(12):
            right = [s for s in range(1, t + 1) if tokens[b, s] == tokens[b, 0]]
            assert np.flatnonzero(is_right[b, t]).tolist() == right


def test_counting_is_measured_against_the_guess_from_the_position():
    task = make_task("counting")
    metrics = task.summarize({"mse": 3.0, "mae": 1.5}, length=9)
    assert metrics == {"loss": 1.5, "mse": 3.0, "error": 3.0 / position_only_mse(9, 4)}


def test_buckets_hold_every_place_once_but_variants_at_the_farthest_and_start_with_the_training_length():
    places = buckets((1, 4, 16, 64), 8, ("", "sparse"))
    assert places[0][0] == (8, "")
    flat = [place for bucket in places for place in bucket]
    wanted = [(8 * factor, v) for factor in (1, 4, 16) for v in ("", "sparse")] + [(512, "")]
    assert sorted(flat) == sorted(wanted)


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_every_length_is_evaluated_on_enough_sequences(suite):
    for name, make in TASKS.items():
        spec = make(suite.name)
        for places in buckets(suite.factors, spec.length, tuple(spec.variants)):
            assert places[0][1] == MAIN
            number = num_sequences(suite, spec, places)
            assert number >= (256 if name == "max_retrieval" else 64), (name, places)


def test_a_read_has_as_many_right_keys_as_there_are_reads_since_the_write():
    """Right keys of flip-flop are not the source alone."""
    task = make_task("flip_flop")
    batch = task.eval_draw(jax.random.key(0), 20, 16, "dense")
    is_asked, is_right = task.questions(batch)
    number = np.sum(np.asarray(is_right), axis=-1)[np.asarray(is_asked)]
    assert number.min() == 1 and number.max() > 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "varies"), [("counting", "mae"), ("sort", "loss")])
def test_sequences_are_judged_alike_with_and_without_padding(name, varies):
    task = make_task(name)
    params, model_state = jax.jit(task.init)(jax.random.key(0))
    # Larger weights, so that the keys that attention sees matter.
    params = jax.tree.map(lambda x: 3 * x, params)
    attention = functools.partial(dot_product_attention, normalizer="l2")

    def judge(batch, positions):
        return task.per_sequence(params, model_state, batch, positions, attention)

    key, places = jax.random.key(1), ((4, ""), (16, ""))
    batch, positions = draw_padded(task, key, 5, places)
    together = jax.jit(judge)(batch, positions)
    assert len(set(together[varies].tolist())) > 5
    for index, (length, variant) in enumerate(places):
        alone = task.eval_draw(jax.random.fold_in(key, index), 5, length, variant)
        own = slice(5 * index, 5 * index + 5)
        wanted = jax.jit(judge)(alone, positions[own])
        for metric, values in wanted.items():
            np.testing.assert_allclose(together[metric][own], values, rtol=1e-4, atol=1e-5, err_msg=metric)
