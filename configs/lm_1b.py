"""A language model of 1.3 billion parameters with L2 attention, for a TPU pod.

    python train.py --workdir=/mnt/BUCKET/lm_1b --config=configs/lm_1b.py

The corpus, of which an epoch is more than the run reads, and which the tokenizer need not see whole:

    python -m attnorm.data --corpus "tfds:c4/en:train[:20%]" --tokenizer bpe:50257 --fit-documents 1000000 \
        --out data/tokens

To compile it for a slice that is not there, without that corpus, and print its memory:

    python train.py --config=configs/lm_1b.py:corpus=python_source,tokenizer=bytes --config.lm.held_out=0.3 \
        --aot=v5e:4x4

Hardware: 16 TPU v5e chips or more. Time: not run yet; 50,000 steps of 524,288 tokens.
Expected: not run yet.
"""

from ml_collections import ConfigDict

from attnorm.training.config import parse_argument
from configs.lm import ARGUMENTS, language_model


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments, after a colon: those of configs/lm.py but ``published`` and ``learned``."""
    sizes = {
        "runlocal": ARGUMENTS["runlocal"] | {"tokenizer": "bytes"},
        "steps": 50_000,
        "learning_rate": 3e-4,
    }
    argument = parse_argument(
        argument, **sizes, corpus="data/tokens", tokenizer="data/tokens", normalizer="l2"
    )
    argument.published = False
    config = language_model("lm_1b", argument, normalizers=(argument.normalizer,), seeds=(0,))
    if argument.runlocal:
        return config
    config.mesh = {"data": 1, "fsdp": -1, "context": 1, "tensor": 1}
    config.lm.update({"held_out": 0.01, "length": 2048, "batch_size": 256, "logits_parts": 8})
    config.lm.update({"eval_length": 16384, "num_eval_batches": 1})
    config.lm.eval_batch_size = 64  # so that up to 64 chips share the pieces
    config.lm.model.update({"vocab_size": 50304, "max_length": 2048, "num_layers": 24, "num_heads": 16})
    config.lm.model.update({"features": 2048, "dtype": "bfloat16", "remat": "full"})
    config.optimizer.schedule = "cosine"
    config.optimizer.cooldown_fraction = 0.0
    config.optimizer.warmup_fraction = 0.01
    config.log_every = 100
    config.checkpoint_every = 1000
    return config
