"""The learning rate over a stage, and Adam with a growing beta2 against NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnorm.training.config import OptimizerConfig
from attnorm.training.optimizer import learning_rate, make_optimizer, scale_by_power_adam
from attnorm.training.task import Stage

CONFIG = OptimizerConfig(
    name="adamw",
    schedule="wsd",
    learning_rate=0.1,
    weight_decay=0.0,
    beta1=0.9,
    beta2=0.99,
    beta2_exponent=0.0,
    clip_norm=1.0,
    warmup_fraction=0.25,
    cooldown_fraction=0.25,
    reset_optimizer=True,
)


def rates(config, stage):
    return [
        float(learning_rate(config, stage, jnp.int32(step))) for step in range(stage.first_step, stage.end)
    ]


def test_learning_rate_warms_up_stays_and_cools_in_each_stage():
    expected = 0.1 * np.array([1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3, 2, 1]) / 4
    for stage in (Stage(0, 0, 16, length=8), Stage(1, 16, 16, length=16)):
        np.testing.assert_allclose(rates(CONFIG, stage), expected, rtol=1e-6)


def test_moments_that_are_kept_are_not_warmed_up_again():
    config = dataclasses.replace(CONFIG, reset_optimizer=False, cooldown_fraction=0.0)
    assert rates(config, Stage(0, 0, 8, length=8))[0] < 0.1
    np.testing.assert_allclose(rates(config, Stage(1, 8, 8, length=16)), 0.1, rtol=1e-6)


@pytest.mark.parametrize("num_steps", [1, 3, 20])
def test_other_schedules_are_their_formulas(num_steps):
    stage, t = Stage(0, 5, num_steps, length=8), np.arange(1, num_steps + 1)
    w = round(num_steps / 4)
    x = (t - 1 - w) / max(num_steps - w, 1)
    formulas = {
        "constant": np.ones(num_steps),
        "linear": 1 - x,
        "cosine": (1 + np.cos(np.pi * x)) / 2,
        "rsqrt": np.sqrt(max(w, 1) / t),
    }
    for schedule, after in formulas.items():
        expected = 0.1 * np.where(t <= w, t / max(w, 1), after)
        config = dataclasses.replace(CONFIG, schedule=schedule, cooldown_fraction=0.0)
        np.testing.assert_allclose(rates(config, stage), expected, rtol=1e-5)
    cooled = dataclasses.replace(CONFIG, schedule="rsqrt", warmup_fraction=0.0, cooldown_fraction=0.5)
    end = np.minimum(1, (num_steps - t + 1) / max(round(num_steps / 2), 1))
    np.testing.assert_allclose(rates(cooled, stage), 0.1 * np.sqrt(1 / t) * end, rtol=1e-5)


def test_muon_makes_the_updates_of_hidden_matrices_nearly_orthogonal():
    rng = np.random.default_rng(0)
    shapes = {
        "blocks": {"kernel": (2, 8, 16), "bias": (2, 16)},
        "head": {"kernel": (8, 4)},
        "embedding": (5, 8),
    }
    params = jax.tree.map(lambda shape: jnp.ones(shape), shapes, is_leaf=lambda x: isinstance(x, tuple))
    gradient = jax.tree.map(lambda x: jnp.float32(rng.normal(size=x.shape)), params)
    config = dataclasses.replace(CONFIG, name="muon", weight_decay=0.1, clip_norm=100.0)
    optimizer = make_optimizer(config)
    update, _ = optimizer.update(gradient, optimizer.init(params), params)
    update = jax.tree.map(lambda x, param: x - 0.1 * param, update, params)  # without the decay
    for layer in range(2):
        g, u = (np.asarray(tree["blocks"]["kernel"][layer], np.float64) for tree in (gradient, update))
        values = np.linalg.svd(u, compute_uv=False) / (0.2 * np.sqrt(16))
        assert 0.5 < values.min() and values.max() < 1.3
        assert np.sum(u * g) > 0.6 * 0.2 * np.sqrt(16) * np.linalg.norm(g, "nuc")  # of steepest descent
    for tree in (update["blocks"]["bias"], update["head"]["kernel"], update["embedding"]):
        # Adam's first with Nesterov's momentum: of a gradient seen twice, and of this one.
        np.testing.assert_allclose(np.abs(tree), 1 + 0.9 * 0.1 / (1 - 0.9**2), rtol=1e-3)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weights_decay_and_what_a_normaliser_learns_does_not(name):
    optimizer = make_optimizer(dataclasses.replace(CONFIG, name=name, weight_decay=0.1))
    params = {
        "attention": {"learned": {"p": jnp.full((2, 2), 3.0)}, "query": {"kernel": jnp.full((2, 3), 5.0)}}
    }
    update, _ = optimizer.update(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    np.testing.assert_array_equal(update["attention"]["learned"]["p"], 0)
    np.testing.assert_allclose(update["attention"]["query"]["kernel"], 0.5, rtol=1e-6)


def test_power_adam_is_the_published_recursion():
    gradients = np.random.default_rng(0).normal(size=(20, 3)) * np.array([1e-3, 1, 1e3])
    transformation = scale_by_power_adam(b1=0.9, exponent=0.8)
    state = transformation.init(jnp.zeros(3))
    m = v = np.zeros(3)
    for t, gradient in enumerate(gradients, start=1):
        beta2 = 1 - t**-0.8
        m, v = 0.9 * m + 0.1 * gradient, beta2 * v + (1 - beta2) * gradient**2
        update, state = transformation.update(jnp.float32(gradient), state)
        np.testing.assert_allclose(update, m / (1 - 0.9**t) / np.sqrt(v), rtol=1e-3)


@pytest.mark.parametrize("exponent", [0.0, 0.8])
def test_a_constant_gradient_gives_steps_of_its_sign_from_the_first_update_on(exponent):
    optimizer = make_optimizer(dataclasses.replace(CONFIG, beta2_exponent=exponent, clip_norm=100.0))
    params, gradient = jnp.zeros(3), jnp.array([0.5, -2.0, 1e-3])
    state = optimizer.init(params)
    for _ in range(5):
        update, state = optimizer.update(gradient, state, params)
        np.testing.assert_allclose(update, jnp.sign(gradient), rtol=1e-3)


def test_the_whole_is_optax_adamw_behind_a_clip():
    config = dataclasses.replace(CONFIG, weight_decay=0.1, clip_norm=0.5)
    optimizer = make_optimizer(config)
    adamw = optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(0.1, b1=0.9, b2=0.99, weight_decay=0.1))
    params = {"w": jnp.array([1.0, -2.0])}
    state, adamw_state = optimizer.init(params), adamw.init(params)
    for scale in (1.0, 0.1, 3.0):
        gradient = {"w": scale * jnp.array([0.3, 0.4])}
        update, state = optimizer.update(gradient, state, params)
        expected, adamw_state = adamw.update(gradient, adamw_state, params)
        np.testing.assert_allclose(-0.1 * update["w"], expected["w"], rtol=1e-5)
