"""What the training loop adds to a step: ``python -m attnorm.bench.loop_overhead``.

The loop of train.py runs a task with next to no computation, on batches from the host, with its usual logging and
checkpoints; so nearly all of the time is the loop's own, none of it hidden behind the device as in training. The bar
is 2 % of steps of 100 ms.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path

import grain
import jax.numpy as jnp
import numpy as np

from attnorm.bench import report
from attnorm.training import loop, tasks
from attnorm.training.task import Stage

_STEP_SECONDS, _BAR = 0.1, 0.02
_ROWS, _LENGTH = 8, 1024
_LOG_EVERY, _CHECKPOINT_EVERY = 20, 500


class _Tokens:
    """Endless rows of a language model's batches."""

    def __len__(self):
        return 1024

    def __getitem__(self, index):
        return {"inputs": np.full(_LENGTH, index, np.int32), "targets": np.full(_LENGTH, index, np.int32)}


@dataclasses.dataclass(frozen=True)
class _IdleConfig:
    num_steps: int


class _IdleTask:
    """See :class:`attnorm.training.task.Task`: one parameter, and a loss that reads one token."""

    Config = _IdleConfig
    outputs = ()
    fingerprint = ""
    num_eval_batches = 1

    def __init__(self, config):
        self.stages = (Stage(0, 0, config.num_steps, _LENGTH),)

    def prepare(self, members):
        return ""

    def init(self, key):
        return {"weight": jnp.zeros(())}, {}

    def host_batches(self, stage, process_index, process_count):
        return grain.MapDataset.source(_Tokens()).seed(0).shuffle().repeat().batch(_ROWS)

    def batch(self, key, stage):
        raise NotImplementedError("all batches come from the host")

    def loss(self, params, model_state, batch, attention):
        return (params["weight"] - batch["inputs"][0, 0]) ** 2, (jnp.float32(1), model_state)

    def eval_batch(self, key, index):
        return {"inputs": jnp.ones((_ROWS, _LENGTH), jnp.int32)}

    def evaluate(self, params, model_state, batch, attention):
        return {"weight": params["weight"]}

    def summarize(self, means):
        return means

    def tokens_per_step(self, stage):
        return _ROWS * _LENGTH

    def flops_per_step(self, stage):
        return 1.0

    def report(self, workdir, members, rows):
        return ""


def run(num_steps: int) -> dict:
    """The report, with the seconds that the loop takes per step."""
    config = {
        "experiment": "loop_overhead",
        "task": "idle",
        "ensemble": {"normalizers": ("l2",), "seeds": (0,), "members_at_once": 1},
        "optimizer": {
            "name": "adamw",
            "schedule": "constant",
            "learning_rate": 1e-3,
            "weight_decay": 0.0,
            "beta1": 0.9,
            "beta2": 0.99,
            "beta2_exponent": 0.0,
            "clip_norm": 1.0,
            "warmup_fraction": 0.0,
            "cooldown_fraction": 0.0,
            "reset_optimizer": False,
        },
        "mesh": {"data": -1, "fsdp": 1, "context": 1, "tensor": 1},
        "accumulation_steps": 1,
        "ema_decay": 0.0,
        "init_from": "",
        "log_every": _LOG_EVERY,
        "eval_every": 0,
        "checkpoint_every": _CHECKPOINT_EVERY,
        "keep_checkpoints": 2,
        "keep_period": 0,
        "idle": {"num_steps": num_steps},
    }
    result = report.new_report(
        "measured overhead of the training loop",
        num_steps=num_steps,
        log_every=_LOG_EVERY,
        checkpoint_every=_CHECKPOINT_EVERY,
    )
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        tasks.TASKS["idle"] = _IdleTask
        stack.callback(tasks.TASKS.pop, "idle")
        loop.run(config, Path(folder) / "run")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    times = {row["step"]: row["wall/seconds"] for row in map(json.loads, lines)}
    steps = sorted(times)[1:]  # the first row waits for the compiler
    paces = [(times[b] - times[a]) / (b - a) for a, b in zip(steps, steps[1:], strict=False)]
    result["seconds_per_step"] = {
        "mean": (times[steps[-1]] - times[steps[0]]) / (steps[-1] - steps[0]),
        "median": statistics.median(paces),
        "max": max(paces),
    }
    return result


def bar(result: dict) -> report.Bar:
    share = result["seconds_per_step"]["mean"] / _STEP_SECONDS
    return report.Bar(f"overhead of the loop in steps of {1000 * _STEP_SECONDS:.0f} ms", share, _BAR)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m attnorm.bench.loop_overhead", description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    options = parser.parse_args()
    if options.steps < 3 * _LOG_EVERY:
        parser.error(f"argument --steps: at least {3 * _LOG_EVERY} are wanted, got {options.steps}")
    if options.out and options.out.exists():
        parser.error(f"argument --out: {options.out} exists; choose another name or remove it")
    result = run(options.steps)
    seconds = result["seconds_per_step"]
    print(", ".join(f"{name} {1000 * value:.3f} ms" for name, value in seconds.items()), "per step")
    print(bar(result))
    if options.out:
        report.write(result, options.out)
    return 0 if bar(result).passed else 1


if __name__ == "__main__":
    sys.exit(main())
