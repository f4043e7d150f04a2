"""A language model of 1.3 billion parameters with L2 attention, for a TPU pod.

    python train.py --workdir=/mnt/BUCKET/lm_1b --config=configs/lm_1b.py

The corpus, of which an epoch is more than the run reads, and which the tokenizer need not see whole:

    python -m attnorm.data --corpus "tfds:c4/en:train[:20%]" --tokenizer bpe:50257 --fit-documents 1000000 \
        --out data/tokens

To compile it for a slice that is not there, without that corpus, and print its memory:

    python train.py --config=configs/lm_1b.py:corpus=python_source,tokenizer=bytes --config.lm.held_out=0.3 \
        --aot=v5e:4x4

With rows of a million tokens, each split over 64 chips (`context`), `--aot=v5p:8x8x8` and the argument
`length=1048576,context=64` beside these. The loss by position is that of single documents of 16,384 tokens then too,
because hardly any is longer than a row. Python's source has too few such rows to evaluate on: of it only the train step
is compiled, and the report says so.

Hardware: 16 TPU v5e chips or more. Time: not run yet; 50,000 steps of 524,288 tokens, or of 8 rows
where these are longer.
Expected: not run yet.
"""

from ml_collections import ConfigDict

from attnorm.training.config import parse_argument
from configs.lm import ARGUMENTS, language_model


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments, after a colon: those of configs/lm.py but ``published`` and ``learned``; ``length``, a power of two,
    of a row in training; ``context``, how many devices split it."""
    sizes = {
        "runlocal": ARGUMENTS["runlocal"] | {"tokenizer": "bytes", "length": 16},
        "steps": 50_000,
        "learning_rate": 3e-4,
        "length": 2048,
        "context": 1,
    }
    argument = parse_argument(
        argument, **sizes, corpus="data/tokens", tokenizer="data/tokens", normalizer="l2"
    )
    argument.published = False
    config = language_model("lm_1b", argument, normalizers=(argument.normalizer,), seeds=(0,))
    length = argument.length
    config.lm.length = config.lm.model.max_length = length
    config.mesh.context = argument.context
    if argument.runlocal:
        return config
    config.mesh.update({"data": 1, "fsdp": -1})
    config.lm.update({"held_out": 0.01, "batch_size": max(524_288 // length, 8), "logits_parts": 8})
    # So that up to 64 chips share the pieces, or with `context` so many times that.
    config.lm.update({"eval_length": 16384, "eval_batch_size": 64, "num_eval_batches": 1})
    config.lm.model.update({"vocab_size": 50304, "num_layers": 24, "num_heads": 16})
    config.lm.model.update({"features": 2048, "dtype": "bfloat16", "remat": "full"})
    config.optimizer.schedule = "cosine"
    config.optimizer.cooldown_fraction = 0.0
    config.optimizer.warmup_fraction = 0.01
    config.log_every = 100
    config.checkpoint_every = 1000
    return config
