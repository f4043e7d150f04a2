"""Kinds of AVnorm: the output of attention normalised per head, by LayerNorm or RMSNorm, or over all heads.

    for norm in none head_layer head_rms global_layer; do
      python train.py --workdir=runs/e5_$norm --config=configs/lm_output_norms.py:output_norm=$norm
    done
    python -m attnorm.analysis extrapolation runs/e5_* --out results/output_norms

Hardware: 2 CPU cores, offline. Time: 10 to 13 minutes a run on one core, two of them side by side.
With :published as configs/lm_extrapolation.py.
Expected: medians of 3 seeds (attnorm/analysis/results/output_norms), loss at positions 64-127 / 256-511 / 2048-4095:
none 1.66/2.73/3.52; head_layer 1.79/2.69/3.31; head_rms 1.77/2.67/3.49; global_layer 1.78/2.71/3.49.
Published, one finetuned run each, loss at 2k/8k/64k: none 3.32/3.84/5.99;
head_layer 3.37/3.83/5.40; head_rms 3.36/3.82/5.40; global_layer 3.37/3.88/5.81. To finetune, as was done
there: train with configs/lm_retrofit.py, and go on by its init_from with each output_norm.
"""

from ml_collections import ConfigDict

from attnorm.training.config import parse_argument
from configs.lm import ARGUMENTS, language_model


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments, after a colon: ``output_norm``; those of configs/lm.py but ``normalizer``, ``learned``."""
    argument = parse_argument(argument, **ARGUMENTS, output_norm="none")
    return language_model(
        "lm_output_norms", argument, normalizers=("softmax",), output_norm=argument.output_norm
    )
