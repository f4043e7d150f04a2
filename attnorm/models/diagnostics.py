"""What attention does while a model runs, in a few numbers per layer."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from attnorm.models.gpt import GPT, AttentionFn


def attention_diagnostics(
    model: GPT,
    tokens: Int[Array, "B T"],
    attention_fn: AttentionFn,
    positions: Int[Array, "B T"],
    segment_ids: Int[Array, "B T"],
) -> Mapping[str, Float[Array, "L"]]:
    """Per layer, means over queries and heads of numbers that describe a query's weights y, and one maximum.

    * ``weight_norm``: ``‖y‖₂``; its square is the variance of the output, for uncorrelated values of variance 1.
    * ``effective_keys``: ``(Σ|y|)² / Σ y²``, which is n for n equal weights, whatever their norm.
    * ``entropy``: of ``|y| / Σ|y|``, in nats.
    * ``output_variance``: of a head's output over its features, before any norm of the output.
    * ``max_logit``: the largest scaled logit that a query may see, of the whole layer.

    The weights are what ``attention_fn`` gives for values that are unit vectors, so they are those of any
    normaliser, and take O(T²) memory: texts should be short.

    Args:
      model: a decoder of L layers.
      tokens, attention_fn, positions: as in :meth:`GPT.hidden`; every position holds a token.
      segment_ids: of the documents that ``attention_fn`` keeps apart.
    """
    graph, layers = nnx.split(model.blocks)

    def step(x, layer):
        found = []

        def observed(query, key, value, **options):
            output = attention_fn(query, key, value, **options)
            found.append(_observe(query, key, output, attention_fn, options, segment_ids))
            return output

        x = nnx.merge(graph, layer)(x, observed, positions)
        return x, found[0]

    return jax.lax.scan(step, model.embed(tokens, positions), layers)[1]


def _observe(query, key, output, attention_fn, options, segment_ids):
    B, T, N, _ = query.shape
    K = key.shape[2]
    unit_vectors = jnp.broadcast_to(jnp.eye(T, dtype=query.dtype)[None, :, None], (B, T, K, T))
    weights = jnp.abs(attention_fn(query, key, unit_vectors, **options).astype(jnp.float32))  # (B, T, N, T)
    sums, squares = jnp.sum(weights, -1), jnp.sum(weights**2, -1)
    # A query that gives no weight to any key, as with thresholds, has no keys and no entropy.
    shares = weights / jnp.where(sums > 0, sums, 1)[..., None]
    entropy = -jnp.sum(jax.scipy.special.xlogy(shares, shares), -1)

    grouped = query.reshape(B, T, K, N // K, -1).astype(jnp.float32)
    logits = options["scale"] * jnp.einsum("BTKGH,BSKH->BKGTS", grouped, key.astype(jnp.float32))
    cap = options.get("logits_soft_cap")
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    is_visible = jnp.tri(T, dtype=bool) & (segment_ids[:, :, None] == segment_ids[:, None])
    return {
        "weight_norm": jnp.mean(jnp.sqrt(squares)),
        "effective_keys": jnp.mean(sums**2 / jnp.where(squares > 0, squares, 1)),
        "entropy": jnp.mean(entropy),
        "output_variance": jnp.mean(jnp.var(output.astype(jnp.float32), -1)),
        "max_logit": jnp.max(jnp.where(is_visible[:, None, None], logits, -jnp.inf)),
    }
