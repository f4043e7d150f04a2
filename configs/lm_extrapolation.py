"""Language models beyond their trained length: softmax, L2 and AVnorm, with and without a length rescale.

    python train.py --workdir=runs/e3 --config=configs/lm_extrapolation.py
    python train.py --workdir=runs/e3_avnorm --config=configs/lm_extrapolation.py:output_norm=head_layer
    python train.py --workdir=runs/e3_trained_yarn --config=configs/lm_extrapolation.py:trained_yarn=32
    python train.py --workdir=runs/e3_avnorm_trained_yarn \
        --config=configs/lm_extrapolation.py:output_norm=head_layer,trained_yarn=32
    python train.py --workdir=runs/e3_sqrt --config=configs/lm_extrapolation.py:output_rescale=sqrt_position
    python train.py --workdir=runs/e3_controls --config=configs/lm_extrapolation.py \
        --config.ensemble.normalizers="('log_n(n_train=128)', 'ssmax')"
    python -m attnorm.analysis extrapolation runs/e3 runs/e3_avnorm runs/e3_trained_yarn \
        runs/e3_avnorm_trained_yarn --out results/extrapolation
    python -m attnorm.analysis extrapolation runs/e3 runs/e3_sqrt --out results/output_rescale

and with a lower learning rate:

    python train.py --workdir=runs/e3_2e-3 --config=configs/lm_extrapolation.py:learning_rate=2e-3
    python train.py --workdir=runs/e3_avnorm_2e-3 \
        --config=configs/lm_extrapolation.py:learning_rate=2e-3,output_norm=head_layer
    python -m attnorm.analysis extrapolation runs/e3_2e-3 runs/e3_avnorm_2e-3 --out results/learning_rate_2e-3

Hardware: 2 CPU cores, offline. Time: 13 to 22 minutes a run, 12 with AVnorm, on one core, two side by side.
With :published, one node of 8 GPUs or a TPU slice (an estimate), and a corpus with documents of at least
65,536 tokens in data/tokens, which `python -m attnorm.data` writes; the controls are then log_n(n_train=2048).
Expected: medians of 3 seeds (attnorm/analysis/results/extrapolation), loss at positions 64-127 / 256-511 / 2048-4095:
softmax 1.66/2.73/3.52, with YaRN in evaluation 2.51/2.72/2.79, in training 1.65/3.33/3.73; L2 1.85/2.88/4.43,
2.57/2.78/2.80, 1.74/3.44/3.77; AVnorm 1.79/2.69/3.31, 2.65/2.77/2.89, 1.74/3.42/3.95; with sqrt_position softmax
1.81/2.61/4.43, L2 1.96/2.82/6.37. With learning rate 2e-3, better at the trained length, softmax 1.64/2.68/3.31, L2
1.75/3.03/4.55, AVnorm 1.77/2.65/3.49. The controls were not run.
Published, one run of 4000 steps each, loss at 2k/8k/64k: softmax with a rescale in
training 3.31/7.28/7.45, without 3.31/4.70/6.89; AVnorm with it 3.31/4.82/6.29, without 3.31/4.24/6.72.
"""

from ml_collections import ConfigDict

from attnorm.training.config import parse_argument
from configs.lm import ARGUMENTS, language_model

_FACTOR = 32.0  # the evaluated length over the trained one


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments, after a colon: those of configs/lm.py but ``normalizer`` and ``learned``; ``output_norm``,
    ``output_rescale``; and ``trained_yarn``, the factor of a length rescale in training, 1 for none."""
    argument = parse_argument(
        argument, **ARGUMENTS, output_norm="none", output_rescale="none", trained_yarn=1.0
    )
    config = language_model(
        "lm_extrapolation",
        argument,
        # Under a norm of the output L2 is softmax.
        normalizers=("softmax", "l2") if argument.output_norm == "none" else ("softmax",),
        output_norm=argument.output_norm,
    )
    config.lm.output_rescale = argument.output_rescale
    if argument.trained_yarn == 1:
        config.lm.eval_yarn_factors = (1.0, _FACTOR)
    else:
        config.lm.model.update({"rope_scaling": "yarn", "rope_factor": argument.trained_yarn})
    return config
