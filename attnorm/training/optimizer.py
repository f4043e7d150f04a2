"""AdamW as the config describes it, and its learning rate."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from attnorm.training.config import OptimizerConfig
from attnorm.training.task import Stage


class PowerAdamState(NamedTuple):
    count: Int[Array, ""]
    mu: optax.Updates
    nu: optax.Updates


def scale_by_power_adam(b1: float, exponent: float, eps: float = 1e-8) -> optax.GradientTransformation:
    """Adam with ``beta2_t = 1 - t^(-exponent)`` at update t = 1, 2, ...

    beta2_1 = 0, so the weights of the squared gradients sum to 1 from the first update on: the second moment has
    no bias to correct. The first moment has, and is corrected as in Adam.

    Source: Adafactor, arXiv 1804.04235, section 7.2.
    """

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return PowerAdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(updates, state, params=None):
        count = state.count + 1
        time = count.astype(jnp.float32)
        b2 = 1 - time**-exponent
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda n, g: b2 * n + (1 - b2) * g**2, state.nu, updates)
        correction = 1 - b1**time
        updates = jax.tree.map(lambda m, n: m / correction / (jnp.sqrt(n) + eps), mu, nu)
        return updates, PowerAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipped AdamW before the learning rate: the update of the parameters is ``-learning_rate(...)`` times it."""
    if config.beta2_exponent > 0:
        adam = scale_by_power_adam(config.beta1, config.beta2_exponent)
    else:
        adam = optax.scale_by_adam(config.beta1, config.beta2)
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm), adam, optax.add_decayed_weights(config.weight_decay)
    )


def learning_rate(config: OptimizerConfig, stage: Stage, step: Int[Array, ""]) -> Float[Array, ""]:
    """Linear warm-up, a constant, and a linear cooldown to almost 0 at the last update of the stage.

    A stage that keeps the moments of the one before has nothing to warm up, and starts at the constant.

    Args:
      step: updates done since the start of the run, in [stage.first_step, stage.end).
    """
    done = step - stage.first_step
    factor = jnp.float32(1)
    warmup = round(config.warmup_fraction * stage.num_steps)
    if warmup and (stage.index == 0 or config.reset_optimizer):
        factor = jnp.minimum(factor, (done + 1) / warmup)
    cooldown = round(config.cooldown_fraction * stage.num_steps)
    if cooldown:
        factor = jnp.minimum(factor, (stage.num_steps - done) / cooldown)
    return config.learning_rate * factor
