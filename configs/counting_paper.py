"""Counting with L1 and L2 attention weights at the published size.

python train.py --workdir=runs/counting_paper --config=configs/counting_paper.py

Hardware: one GPU or TPU with about 40 GB (an estimate), or several: the batch is split over all devices.
Time: not measured; 90,112 steps of 2 models and 131,072 tokens, 3.6e18 floating-point operations.
Expected: not run yet. Published, one run each: after length 512, the MSE at b = 512 is 0.10 to 0.25 for p = 1 and
0.011 to 0.016 for p = 2; after length 32768, at b = 32768, it is 9.6 and 0.85 times that of the position alone.
"""

from ml_collections import ConfigDict

from attnorm.training.config import parse_argument


def get_config(argument: str | None = None) -> ConfigDict:
    """Arguments, after a colon: ``runlocal`` (seconds, to see that it runs), ``steps`` a stage, ``norm`` of the model."""
    argument = parse_argument(argument, runlocal={"steps": 10}, steps=8192, norm="batch")
    config = ConfigDict()
    config.experiment = "counting_paper"
    config.task = "counting"
    config.ensemble = {"normalizers": ("lp(p=1)", "lp(p=2)"), "seeds": (0,), "members_at_once": 1}
    config.optimizer = {
        "name": "adamw",
        "schedule": "constant",
        "learning_rate": 1e-4,
        "weight_decay": 0.1,
        "beta1": 0.9,
        "beta2": 0.999,
        "beta2_exponent": 0.8,
        "clip_norm": 1.0,
        "warmup_fraction": 0.125,
        "cooldown_fraction": 0.0,
        "reset_optimizer": True,
    }
    config.mesh = {"data": -1, "fsdp": 1, "context": 1, "tensor": 1}
    config.accumulation_steps = 1
    config.ema_decay = 0.0
    config.init_from = ""
    config.counting = {
        "vocab_size": 32,
        "first_length": 32,
        "num_stages": 11,
        "steps_per_stage": argument.steps,
        "tokens_per_batch": 131072,
        "eval_length": 32768,
        "eval_batch_size": 1,
        "num_eval_batches": 4,
        "model": {"features": 384, "num_heads": 8, "num_blocks": 8, "norm": argument.norm},
    }
    config.log_every = 64
    config.eval_every = 64
    config.checkpoint_every = 1024
    config.keep_checkpoints = 3
    config.keep_period = 0
    if argument.runlocal:
        config.counting.num_stages = 2
        config.counting.tokens_per_batch = 256
        config.counting.eval_length = 128
        config.counting.num_eval_batches = 2
        config.counting.model.update({"features": 16, "num_heads": 2, "num_blocks": 1})
        config.log_every = 5
        config.eval_every = 5
        config.checkpoint_every = 5
    return config
