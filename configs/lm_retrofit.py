"""AVnorm for a model trained without it: a checkpoint goes on with another output norm or normaliser.

    python train.py --workdir=runs/e4_base --config=configs/lm_retrofit.py
    python train.py --workdir=runs/e4_softmax --config=configs/lm_retrofit.py:init_from=runs/e4_base
    python train.py --workdir=runs/e4_avnorm \
        --config=configs/lm_retrofit.py:init_from=runs/e4_base,output_norm=head_layer
    python train.py --workdir=runs/e4_l2 --config=configs/lm_retrofit.py:init_from=runs/e4_base,normalizer=l2
    python -m attnorm.analysis extrapolation runs/e4_softmax runs/e4_avnorm runs/e4_l2 --out results/retrofit

The first run has three quarters of the steps, and each that goes on from it one. training_loss.csv has the
losses after the change.
Hardware: 2 CPU cores, offline. Time: about 4 minutes, then 2 for each other (estimates).
With :published as configs/lm_extrapolation.py.
Expected: to be measured. Published, loss 10/50/100/500/1000 steps after the change: AVnorm
5.72/4.42/3.75/3.30/3.28; softmax goes on from 3.29 to 3.27.
"""

from ml_collections import ConfigDict

from attnorm.training.config import parse_argument
from configs.lm import ARGUMENTS, language_model


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments, after a colon: those of configs/lm.py but ``learned``; ``steps`` of both parts together;
    ``init_from``, the workdir of the first part, and ``output_norm``."""
    argument = parse_argument(argument, **ARGUMENTS, normalizer="softmax", init_from="", output_norm="none")
    config = language_model(
        "lm_retrofit", argument, normalizers=(argument.normalizer,), output_norm=argument.output_norm
    )
    config.init_from = argument.init_from
    last_part = max(argument.steps // 4, 1)
    if argument.init_from:
        config.lm.num_steps = last_part
        config.optimizer.update({"cooldown_fraction": 0.5, "warmup_fraction": 0.1})
        config.log_every = max(config.log_every // 5, 1)
    else:
        config.lm.num_steps = argument.steps - last_part
        config.optimizer.update({"schedule": "constant", "cooldown_fraction": 0.0})
    return config
