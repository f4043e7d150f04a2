"""What attention does where something is asked: how many keys it reads, which, and what comes out."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from attnorm.attention import attention_weights, dot_product_attention
from attnorm.normalizers import Normalizer

DIAGNOSTICS = {
    "effective_keys": "N_eff = (Σ|y|)² / Σy², mean over layers and heads",
    "weight_norm": "‖y‖₂, mean over layers and heads",
    "output_norm": "‖out‖₂ of a head, mean over layers and heads",
    "output_variance": "variance of out over a head's features, mean over layers and heads",
    "right_share": "Σ|y| on the keys that hold the answer over Σ|y|, of the layer and head with the most",
}


def diagnose(
    task: Any,
    params: Any,
    model_state: Any,
    normalizer: Normalizer,
    batch: Any,
    positions: Int[Array, "B"],
    num_groups: int,
) -> dict[str, Float[Array, "groups"]]:
    """The :data:`DIAGNOSTICS` of one model, averaged over the questions of each group of a batch.

    Dense: O(T²) memory.

    Args:
      positions: of each sequence; later ones are padding.
      num_groups: equal parts of the batch, one after the other.
    """
    weights: list[Array] = []
    outputs: list[Array] = []

    def attention(query, key, value, *, normalizer=normalizer, **options):
        weights.append(attention_weights(query, key, normalizer=normalizer, **options))
        return dot_product_attention(query, key, value, normalizer=normalizer, **options)

    task.apply(params, model_state, batch, attention, tap=outputs.append)
    is_asked, is_right = task.questions(batch)
    is_asked = is_asked & (jnp.arange(is_asked.shape[1]) < positions[:, None])
    count = jnp.sum(is_asked.reshape(num_groups, -1), axis=1)

    def over_questions(x_BxNxT):
        sums_BxN = jnp.sum(jnp.where(is_asked[:, None], x_BxNxT, 0), axis=2)
        return jnp.sum(sums_BxN.reshape(num_groups, -1, sums_BxN.shape[1]), axis=1) / count[:, None]

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
    result = {}
    for name in DIAGNOSTICS:
        by_layer_and_head = jnp.stack([layer[name] for layer in layers])
        reduce = jnp.max if name == "right_share" else jnp.mean
        result[name] = reduce(by_layer_and_head, axis=(0, 2))
    return result
