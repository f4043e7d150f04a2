"""GPT-2's weights, from 124M to 1.5B parameters, in our decoder."""

import re

import numpy as np
from flax import nnx

from attnorm.models.gpt import GPT, GPTConfig
from attnorm.models.pretrained.checkpoint import (
    Checkpoint,
    CheckpointError,
    Names,
    fill,
    require_known,
    whole_numbers,
)

_HEAD = "lm_head.weight"
# Causal masks, which old checkpoints hold as tensors.
_BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$")
_DEFAULTS = {
    "activation_function": "gelu_new",
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}
_KNOWN = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


def load_gpt2(checkpoint: Checkpoint) -> GPT:
    """The model of a GPT-2 checkpoint: with or without the prefix ``transformer.``, with a tied or a free head.

    Args:
      checkpoint: with ``model_type`` "gpt2".

    Raises:
      CheckpointError: another architecture; a weight that is missing, unexpected, or of a shape that config.json
        contradicts; a feature of config.json that GPT-2 does not have.
    """
    if checkpoint.model_type != "gpt2":
        raise CheckpointError(f"{checkpoint.name}: model_type must be 'gpt2', got {checkpoint.model_type!r}")
    require_known(checkpoint, _KNOWN, _DEFAULTS)
    names = Names(checkpoint, "transformer.", _BUFFERS)
    config = _config(checkpoint)
    layers = range(config.num_layers)

    def linear(name: str) -> dict[str, np.ndarray]:
        return {
            "kernel": names.stack(f"h.{{}}.{name}.weight", layers),
            "bias": names.stack(f"h.{{}}.{name}.bias", layers),
        }

    def norm(prefix: str) -> dict[str, np.ndarray]:
        return {
            "scale": names.stack(f"h.{{}}.{prefix}.weight", layers),
            "bias": names.stack(f"h.{{}}.{prefix}.bias", layers),
        }

    joined = linear("attn.c_attn")
    thirds = {key: np.array_split(x, 3, axis=-1) for key, x in joined.items()}
    query, key, value = ({name: x[i] for name, x in thirds.items()} for i in range(3))
    params = {
        "token_embedding": {"embedding": names.take("wte.weight")},
        "position_embedding": {"embedding": names.take("wpe.weight")},
        "blocks": {
            "attention_norm": norm("ln_1"),
            "attention": {"query": query, "key": key, "value": value, "project": linear("attn.c_proj")},
            "mlp_norm": norm("ln_2"),
            "mlp": {"enter": linear("mlp.c_fc"), "leave": linear("mlp.c_proj")},
        },
        "norm": {"scale": names.take("ln_f.weight"), "bias": names.take("ln_f.bias")},
    }
    if not config.tie_embeddings:
        params["head"] = names.take_exactly(_HEAD)
    elif _HEAD in names and not np.array_equal(names.take_exactly(_HEAD), names.take("wte.weight")):
        raise CheckpointError(
            f"{checkpoint.name}: {_HEAD} differs from wte.weight, but config.json says that they are tied"
        )
    names.require_all_taken()
    return fill(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))), params, checkpoint)


def _config(checkpoint: Checkpoint) -> GPTConfig:
    config = checkpoint.config
    sizes = whole_numbers(checkpoint, ("vocab_size", "n_positions", "n_layer", "n_head", "n_embd"))
    try:
        return GPTConfig(
            vocab_size=sizes["vocab_size"],
            max_length=sizes["n_positions"],
            num_layers=sizes["n_layer"],
            num_heads=sizes["n_head"],
            features=sizes["n_embd"],
            norm_eps=config.get("layer_norm_epsilon", 1e-5),
            mlp_features=config.get("n_inner") or 0,
            attention_scale=0.0 if config.get("scale_attn_weights", True) else 1.0,
            tie_embeddings=config.get("tie_word_embeddings", True),
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.name}: {error}") from error
