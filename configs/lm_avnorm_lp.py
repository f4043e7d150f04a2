"""AVnorm makes every L_p alike: training curves of p = 1, 2 and 4 under per-head RMSNorm of the output.

    python train.py --workdir=runs/e7 --config=configs/lm_avnorm_lp.py
    python train.py --workdir=runs/e7_eps --config=configs/lm_avnorm_lp.py:eps=1e-3
    python -m attnorm.analysis extrapolation runs/e7 runs/e7_eps --out results/avnorm_lp

L_p weights are softmax's times one positive number per query and head, which RMSNorm removes, but for its
epsilon: with one that is far below the mean square of the output, which falls like 1/n under softmax, the
models are the same.
Hardware: 2 CPU cores, offline. Time: about 11 minutes a run (an estimate).
With :published as configs/lm_extrapolation.py.
Expected: the same loss for all p at the default epsilon, up to rounding, and another for each at 1e-3; how
far the curves are apart is to be measured.
"""

from ml_collections import ConfigDict

from attnorm.training.config import parse_argument
from configs.lm import ARGUMENTS, language_model


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments, after a colon: those of configs/lm.py but ``normalizer`` and ``learned``; ``eps``."""
    argument = parse_argument(argument, **ARGUMENTS | {"steps": 500}, eps=1e-12)
    return language_model(
        "lm_avnorm_lp",
        argument,
        normalizers=("softmax", "l2", "lp(p=4)"),
        output_norm="head_rms",
        output_norm_eps=argument.eps,
    )
