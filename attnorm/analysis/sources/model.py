"""A model as a source: its layers one after the other, with the heads' inputs and logits taken out."""

import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from attnorm.analysis.sources.source import Attention, scaled_logits
from attnorm.attention import dot_product_attention
from attnorm.models.stack import layer_of
from attnorm.normalizers import Normalizer


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """See :class:`attnorm.analysis.sources.Source`.

    Args:
      normalizer: of the weights that the model was trained with; later layers depend on it. A layer that learned its
        own gives it to the attention function.
      blocks: all layers as one module with a leading layer axis, as :mod:`attnorm.models.stack` makes it.
      num_layers: how many these are.
      embed: from tokens (1, T) to the embeddings of the tokens alone and the input of the first layer, (1, T, D).
      apply: from a block, its input and an attention function to its output.
    """

    name: str
    max_length: int
    vocab_size: int
    is_causal: bool
    normalizer: Normalizer
    tokenize: Callable[[str], Int[np.ndarray, "T"]]
    example_tokens: Callable[[int, int], Int[np.ndarray, "M T"]]
    blocks: nnx.Module
    num_layers: int
    embed: Callable[[Int[Array, "1 T"]], tuple[Float[Array, "1 T D"], Float[Array, "1 T D"]]]
    apply: Callable[[nnx.Module, Float[Array, "1 T D"], Callable], Float[Array, "1 T D"]]

    def layers(self, tokens: Int[np.ndarray, "T"]) -> Iterator[Attention]:
        embedding, x = self.embed(jnp.asarray(tokens, jnp.int32)[None])
        name_width = len(str(self.num_layers - 1))
        for index in range(self.num_layers):
            out, observed = self._step(layer_of(self.blocks, index), x)
            scale = float(observed.pop("scale"))
            yield Attention(
                name=f"layer {index:0{name_width}}",
                layer=index,
                is_causal=self.is_causal,
                scale=scale,
                inputs={"embedding": embedding[0], "layer_input": x[0]},
                **observed,
            )
            x = out

    @functools.cached_property  # all layers, and all texts of one length, share one compilation
    def _step(self) -> Callable:
        """From a layer and its input to its output, and to what its attention was given."""

        @nnx.jit
        def step(block, x_1xTxD):
            given = []

            def attention_fn(
                query, key, value, *, scale=None, logits_soft_cap=None, normalizer=self.normalizer
            ):
                scale = query.shape[-1] ** -0.5 if scale is None else scale
                given.append(self._observe(query, key, value, scale, logits_soft_cap))
                return dot_product_attention(
                    query,
                    key,
                    value,
                    normalizer=normalizer,
                    scale=scale,
                    is_causal=self.is_causal,
                    logits_soft_cap=logits_soft_cap,
                )

            out = self.apply(block, x_1xTxD, attention_fn)
            (observed,) = given
            return out, observed

        return step

    def _observe(self, query, key, value, scale, logits_soft_cap):
        group = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, group, axis=2) for x in (key, value))
        queries, keys, values = (jnp.swapaxes(x[0], 0, 1).astype(jnp.float32) for x in (query, key, value))
        logits = scaled_logits(queries, keys, scale)
        if logits_soft_cap is not None:
            logits = logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
        return {"scale": scale, "logits": logits, "values": values}
