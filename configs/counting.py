"""Counting with L1, L2 and L4 attention weights, at a size for a laptop.

    python train.py --workdir=runs/counting

Hardware: 2 CPU cores. Time: 7 CPU minutes; 8 to 12 minutes with the installation, beside other work.
Expected: MSE divided by that of a guess from the position alone, at b = trained length 16, 32, 64, median of 3 seeds:
p = 1: 0.36, 0.10, 0.083; p = 2: 0.17, 0.005, 0.025; p = 4: 0.20, 0.007, 0.019. L2 and L4 learn faster. At twice the
trained length all three have lost most of this (0.51, 0.45, 0.40 at b = 128), and at 4 times all are worse than the
guess (3.5, 3.6, 3.5 at b = 256).
"""

from ml_collections import ConfigDict

from attnorm.training.config import parse_argument


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments, after a colon: ``runlocal`` (seconds, to see that it runs), ``steps`` a stage, ``norm`` of the model."""
    argument = parse_argument(argument, runlocal={"steps": 10}, steps=320, norm="layer")
    config = ConfigDict()
    config.experiment = "counting"
    config.task = "counting"
    config.ensemble = {
        "normalizers": ("lp(p=1)", "lp(p=2)", "lp(p=4)"),
        "seeds": (0, 1, 2),
        "members_at_once": 3,
    }
    config.optimizer = {
        "name": "adamw",
        "schedule": "wsd",
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.99,
        "beta2_exponent": 0.0,
        "clip_norm": 1.0,
        "warmup_fraction": 0.125,
        "cooldown_fraction": 0.25,
        "reset_optimizer": True,
    }
    config.mesh = {"data": -1, "fsdp": 1, "context": 1, "tensor": 1}
    config.accumulation_steps = 1
    config.ema_decay = 0.0
    config.init_from = ""
    config.counting = {
        "vocab_size": 16,
        "first_length": 16,
        "num_stages": 3,
        "steps_per_stage": argument.steps,
        "tokens_per_batch": 2048,
        "eval_length": 512,
        "eval_batch_size": 8,
        "num_eval_batches": 16,
        "model": {"features": 64, "num_heads": 4, "num_blocks": 2, "norm": argument.norm},
    }
    config.log_every = 20
    config.eval_every = 0
    config.checkpoint_every = 100
    config.keep_checkpoints = 3
    config.keep_period = 0
    if argument.runlocal:
        config.ensemble.seeds = (0,)
        config.counting.num_stages = 2
        config.counting.tokens_per_batch = 256
        config.counting.eval_length = 64
        config.counting.eval_batch_size = 8
        config.counting.num_eval_batches = 2
        config.counting.model.update({"features": 16, "num_heads": 2, "num_blocks": 1})
        config.log_every = 5
        config.checkpoint_every = 5
    return config
