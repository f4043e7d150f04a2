"""Language models without any encoding of positions: softmax and L2, with and without AVnorm.

    python train.py --workdir=runs/e6_none --config=configs/lm_nope.py
    python train.py --workdir=runs/e6_head_layer --config=configs/lm_nope.py:output_norm=head_layer
    python train.py --workdir=runs/e6_global_layer --config=configs/lm_nope.py:output_norm=global_layer
    python -m attnorm.analysis extrapolation runs/e6_* --out results/nope

Hardware: 2 CPU cores, offline. Time: 24 minutes, and 10 to 12 with each output norm, on one core, two runs side by side.
With :published as configs/lm_extrapolation.py.
Expected: medians of 3 seeds (attnorm/analysis/results/nope), loss at positions 64-127 / 256-511 / 2048-4095: softmax
2.46/2.58/2.50; L2 2.51/2.80/3.51; head_layer 2.54/2.62/2.50; global_layer 2.55/2.63/2.51.
Published, one run each, loss at 2k/8k/64k: softmax 3.75/9.12/10.64; head_layer
3.83/5.71/6.18; head_rms 3.84/5.70/6.21; global_layer 3.84/5.55/5.88.
"""

from ml_collections import ConfigDict

from attnorm.training.config import parse_argument
from configs.lm import ARGUMENTS, language_model


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments, after a colon: ``output_norm``; those of configs/lm.py but ``normalizer``, ``learned``."""
    argument = parse_argument(argument, **ARGUMENTS, output_norm="none")
    return language_model(
        "lm_nope",
        argument,
        # Under a norm of the output L2 is softmax.
        normalizers=("softmax", "l2") if argument.output_norm == "none" else ("softmax",),
        position="none",
        output_norm=argument.output_norm,
    )
