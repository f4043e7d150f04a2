"""Trains the experiment that a config describes, or goes on with it where it was stopped.

    python train.py --workdir=runs/counting
    python train.py --workdir=/tmp/try --config=configs/counting.py:runlocal
    python train.py --workdir=runs/slow --config.optimizer.learning_rate=3e-4

The workdir holds config.json, metrics.jsonl and .csv, tensorboard/, checkpoints/ and the results. Stop a run at any
moment; the same command resumes it. --config.a.b=value changes a value of the config.
"""

import ast
import shlex
import sys
from pathlib import Path

from absl import app, flags, logging
from ml_collections import config_flags

_ROOT = Path(__file__).resolve().parent
_CONFIG = config_flags.DEFINE_config_file(
    "config", str(_ROOT / "configs" / "counting.py"), "The experiment: a file, and after a colon its arguments."
)
_WORKDIR = flags.DEFINE_string("workdir", None, "Where the run is kept. Required.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown argument {argv[1]!r}")
    if not _WORKDIR.value:
        raise app.UsageError("--workdir is required, for example --workdir=runs/counting")
    if flags.FLAGS["verbosity"].using_default_value:
        logging.set_verbosity(logging.WARNING)
    print("loading JAX", flush=True)
    from attnorm.training import loop
    from attnorm.training.config import ConfigError
    from attnorm.training.mesh import ClusterError, initialize_distributed
    from attnorm.training.workdir import WorkdirError

    try:
        initialize_distributed()
        finished = loop.run(_CONFIG.value.to_dict(), Path(_WORKDIR.value))
    except (ClusterError, ConfigError, WorkdirError, loop.NonFiniteError) as error:
        sys.exit(f"error: {error}")
    if finished:
        print(f"finished; everything is in {_WORKDIR.value}")
    else:
        print(f"resume with: {shlex.join(['python', *sys.argv])}")


def _configs() -> str:
    lines = []
    for path in sorted((_ROOT / "configs").glob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"    configs/{path.name:24} {doc.partition(chr(10))[0]}")
    return "\nConfigs:\n" + "\n".join(lines)


if __name__ == "__main__":
    __doc__ += _configs()
    app.run(main)
