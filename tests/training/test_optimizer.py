"""The learning rate over a stage, and Adam with a growing beta2 against NumPy."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from attnorm.training.config import OptimizerConfig
from attnorm.training.optimizer import learning_rate, make_optimizer, scale_by_power_adam
from attnorm.training.task import Stage

CONFIG = OptimizerConfig(
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
