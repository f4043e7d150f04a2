"""A model trained with the fused kernels has the loss curve of the dense reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import attnorm
from attnorm import kernels
from attnorm.data.counting import counting_batch
from attnorm.models.counting import CountingTransformer
from tests.kernels.conftest import INTERPRET

LENGTH, SYMBOLS, STEPS = 140, 4, 50


def loss_curve(implementation):
    attention_fn = functools.partial(
        attnorm.dot_product_attention,
        is_causal=True,
        normalizer="l2",
        precision="highest",
        implementation=implementation,
    )
    model = CountingTransformer(
        SYMBOLS, features=16, num_heads=2, num_blocks=2, norm="layer", rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(model)
    optimizer = optax.adam(3e-3)

    def loss(params, key):
        tokens, counts = counting_batch(key, 2, LENGTH, SYMBOLS)
        return jnp.mean((nnx.merge(graph, params)(tokens, attention_fn) - counts) ** 2)

    def step(carry, key):
        params, state = carry
        value, gradients = jax.value_and_grad(loss)(params, key)
        updates, state = optimizer.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), value

    keys = jax.random.split(jax.random.key(0), STEPS)
    with kernels.config(INTERPRET):
        return jax.jit(lambda carry: jax.lax.scan(step, carry, keys)[1])((params, optimizer.init(params)))


@pytest.mark.slow
def test_the_loss_curve_of_the_dense_reference():
    fused, dense = loss_curve("pallas_tpu"), loss_curve("reference")
    assert dense[-1] < 0.8 * dense[0]
    np.testing.assert_allclose(fused, dense, rtol=1e-5)
