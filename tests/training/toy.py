"""A task for tests: regression on a few masked targets from the host, small enough to compile in no time."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from attnorm.data.pipeline import batches
from attnorm.training.task import Stage
from attnorm.training.workdir import write_atomically

FEATURES, ROWS = 4, 48


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    num_steps: int
    batch_size: int
    hidden: int


def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    y = np.sin(x.sum(1))
    mask = np.float32(np.arange(ROWS) % 7 != 3)  # no batch of 8 is without a target
    return [{"x": x[i], "y": y[i], "mask": mask[i]} for i in range(ROWS)]


class ToyTask:
    Config = ToyConfig
    outputs = ("toy.txt",)
    fingerprint = ""
    num_eval_batches = 2

    def __init__(self, config):
        self.config = config
        self.stages = (Stage(0, 0, config.num_steps, length=1),)

    def prepare(self, members):
        return ""

    def init(self, key):
        keys = jax.random.split(key)
        kernel = jax.random.normal(keys[0], (FEATURES, self.config.hidden)) / 2
        last = jax.random.normal(keys[1], (self.config.hidden, 1)) / 2
        bias = jnp.zeros(self.config.hidden)
        return {"enter": {"kernel": kernel, "bias": bias}, "leave": {"kernel": last}}, {}

    def host_batches(self, stage, process_index, process_count):
        return batches(
            rows(),
            self.config.batch_size,
            seed=1,
            process_index=process_index,
            process_count=process_count,
        )

    def loss(self, params, model_state, batch, attention):
        hidden = jnp.tanh(batch["x"] @ params["enter"]["kernel"] + params["enter"]["bias"])
        errors = (hidden @ params["leave"]["kernel"])[:, 0] - batch["y"]
        return jnp.sum(batch["mask"] * errors**2), (jnp.sum(batch["mask"]), model_state)

    def eval_batch(self, key, index):
        whole = jax.tree.map(lambda *x: jnp.stack(x), *rows())
        half = ROWS // self.num_eval_batches
        return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, index * half, half), whole)

    def evaluate(self, params, model_state, batch, attention):
        total, (count, _) = self.loss(params, model_state, batch, attention)
        return {"error": total / count}

    def summarize(self, means):
        return means

    def tokens_per_step(self, stage):
        return self.config.batch_size

    def flops_per_step(self, stage):
        return 6.0 * self.config.batch_size * self.config.hidden * (FEATURES + 1)

    def report(self, workdir, members, rows):
        text = f"{len(rows)} evaluations"
        write_atomically(workdir / "toy.txt", text)
        return text


def config(**changes):
    return {
        "experiment": "toy",
        "task": "toy",
        "ensemble": {"normalizers": ("l2",), "seeds": (0, 1), "members_at_once": 2},
        "optimizer": {
            "name": "adamw",
            "schedule": "constant",
            "learning_rate": 1e-2,
            "weight_decay": 0.0,
            "beta1": 0.9,
            "beta2": 0.99,
            "beta2_exponent": 0.0,
            "clip_norm": 1e9,
            "warmup_fraction": 0.0,
            "cooldown_fraction": 0.0,
            "reset_optimizer": False,
        },
        "mesh": {"data": -1, "fsdp": 1, "context": 1, "tensor": 1},
        "accumulation_steps": 1,
        "ema_decay": 0.0,
        "init_from": "",
        "log_every": 1,
        "eval_every": 5,
        "checkpoint_every": 3,
        "keep_checkpoints": 10,
        "keep_period": 0,
        "toy": {"num_steps": 10, "batch_size": 8, "hidden": 6},
        **changes,
    }


def mean_loss(params, batch):
    """The mean over the targets, in float64."""
    enter, leave = params["enter"], params["leave"]
    x, y, mask = (np.asarray(batch[key], np.float64) for key in ("x", "y", "mask"))
    hidden = np.tanh(x @ np.asarray(enter["kernel"], np.float64) + enter["bias"])
    errors = (hidden @ np.asarray(leave["kernel"], np.float64))[:, 0] - y
    return np.sum(mask * errors**2) / np.sum(mask)


def long_config(num_steps):
    """Of a run that takes long enough to be stopped."""
    return config(
        log_every=10,
        checkpoint_every=50,
        eval_every=0,
        toy={"num_steps": num_steps, "batch_size": 8, "hidden": 6},
    )


if __name__ == "__main__":  # WORKDIR STEPS AXIS=SIZE...
    import sys
    from pathlib import Path

    from attnorm.training import loop, mesh
    from attnorm.training.tasks import TASKS

    TASKS["toy"] = ToyTask
    mesh.initialize_distributed()
    toy = long_config(int(sys.argv[2]))
    toy["mesh"] |= {axis: int(size) for axis, size in (item.split("=") for item in sys.argv[3:])}
    finished = loop.run(toy, Path(sys.argv[1]))
    print("finished" if finished else "stopped")
