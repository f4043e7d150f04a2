"""BERT's weights, such as MiniLM's, in our encoder."""

import re
from typing import Any

import numpy as np
from flax import nnx

from attnorm.models.encoder import Encoder, EncoderConfig
from attnorm.models.pretrained.checkpoint import (
    Checkpoint,
    CheckpointError,
    Names,
    fill,
    require_known,
    whole_numbers,
)

# Position ids, which old checkpoints hold as a tensor; and what follows the encoder.
_IGNORED = re.compile(r"^(bert\.)?(embeddings\.position_ids$|pooler\.)|^cls\.")
_DEFAULTS = {"hidden_act": "gelu", "position_embedding_type": "absolute", "is_decoder": False}
_KNOWN = {"hidden_act": ("gelu",), "position_embedding_type": ("absolute",), "is_decoder": (False,)}


def load_bert(checkpoint: Checkpoint) -> Encoder:
    """The encoder of a BERT checkpoint, with or without the prefix ``bert.``; pooler and heads are left out.

    Args:
      checkpoint: with ``model_type`` "bert".

    Raises:
      CheckpointError: another architecture; a weight that is missing, unexpected, or of a shape that config.json
        contradicts; a feature of config.json that is not known here.
    """
    if checkpoint.model_type != "bert":
        raise CheckpointError(f"{checkpoint.name}: model_type must be 'bert', got {checkpoint.model_type!r}")
    require_known(checkpoint, _KNOWN, _DEFAULTS)
    config = _config(checkpoint)
    names = Names(checkpoint, "bert.", _IGNORED)
    layers = range(config.num_layers)

    def linear(name: str) -> dict[str, np.ndarray]:
        # PyTorch's linear maps have their outputs first.
        kernel = names.stack(f"encoder.layer.{{}}.{name}.weight", layers).swapaxes(-1, -2)
        return {"kernel": kernel, "bias": names.stack(f"encoder.layer.{{}}.{name}.bias", layers)}

    def norm(name: str) -> dict[str, np.ndarray]:
        return {
            "scale": names.stack(f"encoder.layer.{{}}.{name}.weight", layers),
            "bias": names.stack(f"encoder.layer.{{}}.{name}.bias", layers),
        }

    params: dict[str, Any] = {
        f"{key}_embedding": {"embedding": names.take(f"embeddings.{name}_embeddings.weight")}
        for key, name in {"token": "word", "position": "position", "type": "token_type"}.items()
    }
    params["norm"] = {
        "scale": names.take("embeddings.LayerNorm.weight"),
        "bias": names.take("embeddings.LayerNorm.bias"),
    }
    params["blocks"] = {
        "attention": {
            "query": linear("attention.self.query"),
            "key": linear("attention.self.key"),
            "value": linear("attention.self.value"),
            "project": linear("attention.output.dense"),
        },
        "attention_norm": norm("attention.output.LayerNorm"),
        "enter": linear("intermediate.dense"),
        "leave": linear("output.dense"),
        "mlp_norm": norm("output.LayerNorm"),
    }
    names.require_all_taken()
    return fill(nnx.eval_shape(lambda: Encoder(config, rngs=nnx.Rngs(0))), params, checkpoint)


def _config(checkpoint: Checkpoint) -> EncoderConfig:
    config = checkpoint.config
    keys = {
        "vocab_size": "vocab_size",
        "max_length": "max_position_embeddings",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "features": "hidden_size",
        "mlp_features": "intermediate_size",
        "num_token_types": "type_vocab_size",
    }
    sizes = whole_numbers(checkpoint, keys.values())
    try:
        return EncoderConfig(
            **{field: sizes[key] for field, key in keys.items()}, norm_eps=config.get("layer_norm_eps", 1e-12)
        )
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{checkpoint.name}: {error}") from error
