"""How much the weights of many rows change with their logits, at many temperatures. In float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from attnorm.normalizers import Normalizer
from attnorm.theory import top_direction

_ROWS_AT_ONCE = 32
_NUM_ITERATIONS = 24
_NUM_PROBES = 4


def gradient_rows(
    normalizer: Normalizer,
    products: Float[Array, "N R S"],
    visible: Bool[Array, "R S"],
    position: Int[Array, "R"],
    *,
    temperatures: tuple[float, ...],
    steps: tuple[float, ...],
    seed: int,
) -> dict[str, Float[np.ndarray, "N R Q ..."]]:
    """Finite differences and the Jacobian's norms of every row, at Q temperatures.

    Args:
      normalizer: gives the weights of ``products / T``.
      products: inner products of queries and keys, not scaled.
      visible: the keys that a row sees; directions have no part on the others.
      position: of the rows' queries.
      temperatures: T.
      steps: ε.
      seed: of the directions: one for all finite differences of a row, and four more for the mean response.

    Returns:
      ``difference``, g along a random direction (N R Q steps); ``spectral``, ‖J‖₂ with J the derivative to
      the products (N R Q); ``mean_response``, the root mean square of ‖J v‖ over random unit v, an estimate
      of ``‖J‖_F / sqrt(L)`` (N R Q); ``direction_keys``, ``1 / Σ v⁴`` of the top singular direction, the
      number of keys that it moves (N R Q).
    """
    with jax.enable_x64(True):
        N, R, S = products.shape
        keys = jax.random.split(jax.random.key(seed), N * R).reshape(N, R)
        results = _gradient_rows(
            normalizer,
            jnp.asarray(np.asarray(products), jnp.float64),
            visible,
            position,
            keys,
            jnp.asarray(temperatures, jnp.float64),
            jnp.asarray(steps, jnp.float64),
        )
        return jax.tree.map(np.asarray, results)


@functools.partial(jax.jit)
def _gradient_rows(normalizer, products, visible, position, keys, temperatures, steps):
    def row(args):
        product, seen, at, key = args

        def weights(product):
            return normalizer.weights(product, where=seen, position=at[None])

        directions = jnp.where(seen, jax.random.normal(key, (1 + _NUM_PROBES, seen.size)), 0)
        directions = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)

        def at_temperature(temperature):
            def of(product):
                return weights(product / temperature)

            before, jvp = jax.linearize(of, product)
            difference = jax.vmap(
                lambda step: jnp.linalg.norm(of(product + step * directions[0]) - before) / step
            )(steps)
            responses = jax.vmap(lambda v: jnp.sum(jvp(v) ** 2))(directions[1:])
            spectral, direction = top_direction(
                of, product, num_iterations=_NUM_ITERATIONS, start=jnp.sum(directions, 0)
            )
            return {
                "difference": difference,
                "spectral": spectral,
                "mean_response": jnp.sqrt(jnp.mean(responses)),
                "direction_keys": 1 / jnp.sum(direction**4),
            }

        return jax.lax.map(at_temperature, temperatures)

    N, R, S = products.shape
    flat = (
        products.reshape(N * R, S),
        jnp.broadcast_to(visible, (N, R, S)).reshape(N * R, S),
        jnp.broadcast_to(position, (N, R)).reshape(N * R),
        keys.reshape(N * R),
    )
    results = jax.lax.map(row, flat, batch_size=_ROWS_AT_ONCE)
    return jax.tree.map(lambda x: x.reshape(N, R, *x.shape[1:]), results)
