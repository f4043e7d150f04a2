"""What attention does where something is asked: how many keys it reads, which, and what comes out."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnorm.attention import attention_weights, dot_product_attention
from attnorm.normalizers import Normalizer

DIAGNOSTICS = {
    "effective_keys": "N_eff = (Σ|y|)² / Σy², mean over layers and heads",
    "weight_norm": "‖y‖₂, mean over layers and heads",
    "output_norm": "‖out‖₂ of a head, mean over layers and heads",
    "output_variance": "variance of out over a head's features, mean over layers and heads",
    "right_share": "Σ|y| on the keys that hold the answer over Σ|y|, of the layer and head with the most; NaN "
    "where no question has such keys",
}


def diagnose(
    task: Any,
    params: Any,
    model_state: Any,
    normalizer: Normalizer,
    draw: Callable[[Int[Array, ""]], tuple[Any, Int[Array, "B"]]],
    num_draws: int,
    num_groups: int,
) -> dict[str, Float[Array, "groups"]]:
    """The :data:`DIAGNOSTICS` of one model, averaged over the questions of each group of all batches.

    Dense: O(T²) memory, for one batch at a time.

    Args:
      draw: ``draw(index)`` gives a batch, and how many positions each sequence has; later ones are padding.
      num_groups: equal parts of a batch, one after the other.
    """

    def of_batch(index):
        return _sums(task, params, model_state, normalizer, *draw(index), num_groups)

    by_batch = jax.lax.map(of_batch, jnp.arange(num_draws))
    sums, count, num_answerable = jax.tree.map(lambda x: jnp.sum(x, axis=0), by_batch)
    result = {}
    for name, sums_LxGxN in sums.items():
        reduce = jnp.max if name == "right_share" else jnp.mean
        result[name] = reduce(sums_LxGxN / count[:, None], axis=(0, 2))
    result["right_share"] = jnp.where(num_answerable > 0, result["right_share"], jnp.nan)
    return result


def _sums(task, params, model_state, normalizer, batch, positions, num_groups):
    """Sums over the questions, by layer, group and head; how many a group has, and how many of these right keys."""
    weights: list[Array] = []
    outputs: list[Array] = []

    def attention(query, key, value, *, normalizer=normalizer, **options):
        weights.append(attention_weights(query, key, normalizer=normalizer, **options))
        return dot_product_attention(query, key, value, normalizer=normalizer, **options)

    task.apply(params, model_state, batch, attention, tap=outputs.append)
    is_asked, is_right = task.questions(batch)
    is_asked = is_asked & (jnp.arange(is_asked.shape[1]) < positions[:, None])
    has_right = is_asked & jnp.any(is_right, axis=-1)
    count, num_answerable = (jnp.sum(x.reshape(num_groups, -1), axis=1) for x in (is_asked, has_right))

    def over_questions(x_BxNxT):
        sums_BxN = jnp.sum(jnp.where(is_asked[:, None], x_BxNxT, 0), axis=2)
        return jnp.sum(sums_BxN.reshape(num_groups, -1, sums_BxN.shape[1]), axis=1)

    layers = []
    for y_BxNxTxS, out_BxTxNxH in zip(weights, outputs, strict=True):
        size = jnp.abs(y_BxNxTxS)
        total, squares = jnp.sum(size, axis=-1), jnp.sum(size**2, axis=-1)
        right = jnp.sum(size * is_right[:, None], axis=-1)
        out = jnp.moveaxis(out_BxTxNxH, 1, 2)
        # A row of zeros reads no key.
        layers.append(
            {
                "effective_keys": over_questions(total**2 / jnp.where(squares > 0, squares, 1)),
                "weight_norm": over_questions(jnp.sqrt(squares)),
                "output_norm": over_questions(jnp.linalg.norm(out, axis=-1)),
                "output_variance": over_questions(jnp.var(out, axis=-1)),
                "right_share": over_questions(right / jnp.where(total > 0, total, 1)),
            }
        )
    return jax.tree.map(lambda *x: jnp.stack(x), *layers), count, num_answerable
