"""What attention does where something is asked: how many keys it reads, which, and what comes out."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

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
    task: Any, params: Any, model_state: Any, normalizer: Normalizer, batch: Any
) -> dict[str, Float[Array, ""]]:
    """The :data:`DIAGNOSTICS` of one model, averaged over the questions of a batch. Dense: O(T²) memory."""
    weights, outputs = [], []

    def attention(query, key, value, *, normalizer=normalizer, **options):
        weights.append(attention_weights(query, key, normalizer=normalizer, **options))
        return dot_product_attention(query, key, value, normalizer=normalizer, **options)

    task.apply(params, model_state, batch, attention, tap=outputs.append)
    is_asked, is_right = task.questions(batch)
    count = jnp.sum(is_asked)

    def over_questions(x_BxNxT):
        return jnp.sum(jnp.where(is_asked[:, None], x_BxNxT, 0), axis=(0, 2)) / count

    layers = []
    for y_BxNxTxS, out_BxTxNxH in zip(weights, outputs, strict=True):
        size = jnp.abs(y_BxNxTxS)
        total, squares = jnp.sum(size, axis=-1), jnp.sum(size**2, axis=-1)
        out = jnp.moveaxis(out_BxTxNxH, 1, 2)
        # A row of zeros reads no key.
        layers.append(
            {
                "effective_keys": over_questions(total**2 / jnp.where(squares > 0, squares, 1)),
                "weight_norm": over_questions(jnp.sqrt(squares)),
                "output_norm": over_questions(jnp.linalg.norm(out, axis=-1)),
                "output_variance": over_questions(jnp.var(out, axis=-1)),
                "right_share": over_questions(
                    jnp.sum(size * is_right[:, None], axis=-1) / jnp.where(total > 0, total, 1)
                ),
            }
        )
    over_heads = {name: jnp.stack([layer[name] for layer in layers]) for name in DIAGNOSTICS}
    return {name: jnp.max(x) if name == "right_share" else jnp.mean(x) for name, x in over_heads.items()}
