"""AdamW or Muon as the config describes it, and its learning rate."""

import re

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from attnorm.training.config import OptimizerConfig
from attnorm.training.task import Stage


def scale_by_power_adam(b1: float, exponent: float, eps: float = 1e-8) -> optax.GradientTransformation:
    """Adam with ``beta2_t = 1 - t^(-exponent)`` at update t = 1, 2, ...

    beta2_1 = 0, so the weights of the squared gradients sum to 1 from the first update on: the second moment has
    no bias to correct. The first moment has, and is corrected as in Adam.

    Source: Adafactor, arXiv 1804.04235, section 7.2.
    """

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return optax.ScaleByAdamState(jnp.zeros((), jnp.int32), zeros, zeros)

    def update(updates, state, params=None):
        count = state.count + 1
        time = count.astype(jnp.float32)
        b2 = 1 - time**-exponent
        mu = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.mu, updates)
        nu = jax.tree.map(lambda n, g: b2 * n + (1 - b2) * g**2, state.nu, updates)
        correction = 1 - b1**time
        updates = jax.tree.map(lambda m, n: m / correction / (jnp.sqrt(n) + eps), mu, nu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init, update)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping and AdamW or Muon, without the learning rate: the update is ``-learning_rate(...)`` times it.

    Muon has the matrices of hidden layers, with updates of the size of Adam's (arXiv 2502.16982), so that one learning
    rate serves both; Adam, here with Nesterov's momentum, has the rest.
    """
    clip = optax.clip_by_global_norm(config.clip_norm)
    if config.name == "muon":
        muon = optax.contrib.muon(
            1.0,
            beta=config.beta1,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=_hidden_matrices,
            consistent_rms=0.2,
        )
        return optax.chain(clip, muon, _scale_and_decay(-1.0, config.weight_decay))
    if config.beta2_exponent > 0:
        adam = scale_by_power_adam(config.beta1, config.beta2_exponent)
    else:
        adam = optax.scale_by_adam(config.beta1, config.beta2)
    return optax.chain(clip, adam, _scale_and_decay(1.0, config.weight_decay))


def _scale_and_decay(scale: float, weight_decay: float) -> optax.GradientTransformation:
    """``scale update + weight_decay param``, without the decay where a normaliser learns: 0 is no rest there."""

    def of_leaf(path, update, param):
        name = "/" + jax.tree_util.keystr(path, simple=True, separator="/")
        return scale * update if "/learned/" in name else scale * update + weight_decay * param

    return optax.stateless(lambda updates, params: jax.tree_util.tree_map_with_path(of_leaf, updates, params))


def _hidden_matrices(params):
    """For each kernel outside the output head, its axes of inputs and outputs; any before them stack layers."""

    def numbers(path, param):
        name = "/" + jax.tree_util.keystr(path, simple=True, separator="/")
        is_hidden = re.search("/kernel$", name) and not re.search("/head/", name)
        return optax.contrib.MuonDimensionNumbers(-2, -1) if is_hidden else None

    return jax.tree_util.tree_map_with_path(numbers, params)


def learning_rate(config: OptimizerConfig, stage: Stage, step: Int[Array, ""]) -> Float[Array, ""]:
    r"""The learning rate of an update: linear warm-up over w of a stage's n, then the schedule.

    At update t = 1, ..., n of the stage, times the config's rate, after the warm-up:

    * constant, wsd (warmup, stable, decay): 1;
    * linear: :math:`1 - x`, with :math:`x = (t - 1 - w) / (n - w)`;
    * cosine: :math:`(1 + \cos \pi x) / 2`;
    * rsqrt: :math:`\sqrt{w / t}`, where w is at least 1.

    wsd and rsqrt end in a linear cooldown to almost 0. A stage that keeps the moments of the one before has nothing
    to warm up: there w = 0.

    Args:
      step: updates done since the start of the run, in [stage.first_step, stage.end).
    """
    done = step - stage.first_step
    is_warmed_up = stage.index == 0 or config.reset_optimizer
    warmup = round(config.warmup_fraction * stage.num_steps) if is_warmed_up else 0
    progress = (done - warmup) / max(stage.num_steps - warmup, 1)
    factor = {
        "constant": lambda: jnp.float32(1),
        "wsd": lambda: jnp.float32(1),
        "linear": lambda: 1 - progress,
        "cosine": lambda: (1 + jnp.cos(jnp.pi * progress)) / 2,
        "rsqrt": lambda: jnp.sqrt(max(warmup, 1) / (done + 1)),
    }[config.schedule]()
    if warmup:
        factor = jnp.where(done < warmup, (done + 1) / warmup, factor)
    cooldown = round(config.cooldown_fraction * stage.num_steps)
    if cooldown:
        factor = factor * jnp.minimum(1, (stage.num_steps - done) / cooldown)
    return config.learning_rate * factor
