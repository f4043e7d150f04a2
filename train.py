"""Trains the experiment that a config describes, or goes on with it where it was stopped.

    python train.py --workdir=runs/counting
    python train.py --workdir=/tmp/try --config=configs/counting.py:runlocal
    python train.py --workdir=runs/slow --config.optimizer.learning_rate=3e-4
    python train.py --aot=v5e:4x4 --config=configs/lm_1b.py

The workdir holds config.json, data.json, metrics.jsonl and .csv, tensorboard/, checkpoints/ and the results. Stop a
run at any moment; the same command resumes it. --config.a.b=value changes a value of the config.
--profile_steps=10-12 writes a trace of these steps. --aot compiles the train step and the evaluation for a TPU
topology, of which nothing needs to be there but libtpu, and prints what they would take.
"""

import os
import shlex
import signal
import sys


def _stop(signum, frame) -> None:
    # Not sys.exit: the code that is interrupted, an import for example, may catch its exception.
    print(f"\nstopped with nothing left to save; go on with: {_command()}", flush=True)
    os._exit(0)


def _command() -> str:
    return shlex.join(["python", *sys.argv])


if __name__ == "__main__":
    # Before the slow imports. The loop, which has something to save, has handlers of its own.
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)

import ast  # noqa: E402
import re  # noqa: E402
from pathlib import Path  # noqa: E402

from absl import app, flags, logging  # noqa: E402
from ml_collections import config_flags  # noqa: E402

_ROOT = Path(__file__).resolve().parent


def main(argv: list[str]) -> None:
    if not flags.FLAGS["verbosity"].present:
        # What the libraries' threads log as an error is raised too, and printed below without its tracebacks.
        logging.set_verbosity(logging.FATAL)
    print("loading JAX", flush=True)
    if flags.FLAGS.aot:
        _compile_ahead(flags.FLAGS.config.to_dict(), flags.FLAGS.aot)
        return
    from attnorm.training import loop
    from attnorm.training.checkpoint import CheckpointError
    from attnorm.training.config import ConfigError
    from attnorm.training.mesh import ClusterError, initialize_distributed
    from attnorm.training.profile import parse_steps
    from attnorm.training.workdir import WorkdirError

    workdir = Path(flags.FLAGS.workdir)
    try:
        profile_steps = parse_steps(flags.FLAGS.profile_steps)
        initialize_distributed()
        finished = loop.run(flags.FLAGS.config.to_dict(), workdir, profile_steps)
    except (CheckpointError, ClusterError, ConfigError, WorkdirError, loop.NonFiniteError) as error:
        _end(f"error: {error}")
    except KeyboardInterrupt:
        _end(f"ended at once; resume from the last checkpoint with: {_command()}")
    if finished:
        print(f"finished; everything is in {workdir}")
    else:
        print(f"resume with: {_command()}")


def _end(message: str) -> None:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    # Threads that failed to write would bury the message under theirs, and those of a cluster wait for the others.
    os._exit(1)


def _compile_ahead(config: dict, topology: str) -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"  # before JAX is loaded: no device of this machine takes part
    from attnorm.topology import LibtpuMissing, UnknownTopology
    from attnorm.training import aot
    from attnorm.training.config import ConfigError

    try:
        print(aot.compile_ahead(config, topology))
    except (aot.DoesNotFitError, ConfigError, LibtpuMissing, UnknownTopology) as error:
        sys.exit(f"error: --aot={topology}: {error}")


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        # Defining the config flag reads the default file, and applies the overrides in argv to it.
        config_flags.DEFINE_config_file(
            "config",
            str(_ROOT / "configs" / "counting.py"),
            "The experiment: a file, and after a colon its arguments.",
        )
        flags.DEFINE_string("workdir", None, "Where the run is kept. Required, but with --aot.")
        flags.DEFINE_string("aot", None, "Compile for this TPU topology, such as v5e:4x4, and train nothing.")
        flags.DEFINE_string("profile_steps", None, "Write a trace of these steps, such as 10-12.")
        arguments = flags.FLAGS(argv)
        flags.FLAGS.config.to_dict()  # raises if the file could not be read
    except (flags.Error, OSError) as error:
        # The last line of a traceback of the config file, without the name of the exception's class.
        _exit(re.sub(r"^[\w.]*ConfigError: ", "", str(error).strip().splitlines()[-1].strip()))
    except (AttributeError, KeyError) as error:
        overrides = [argument for argument in argv if argument.startswith("--config.")]
        hint = str(error).replace("\\'", "'").replace("\\n", "; ").strip("\"'")
        _exit(f"unknown key in {' '.join(overrides)}: {hint}")
    if arguments[1:]:
        _exit(f"unknown argument {arguments[1]!r}")
    if not flags.FLAGS.workdir and not flags.FLAGS.aot:
        _exit("--workdir is missing, for example --workdir=runs/counting")
    if "://" in (flags.FLAGS.workdir or ""):
        _exit(f"--workdir must be a folder of a file system that is mounted, got {flags.FLAGS.workdir}")
    return arguments


def _exit(message: str) -> None:
    sys.exit(f"error: {message}\n(--help shows the flags and the configs)")


def _configs() -> str:
    lines = []
    for path in sorted((_ROOT / "configs").glob("*.py")):
        doc = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        lines.append(f"    configs/{path.name:24} {doc.partition(chr(10))[0]}")
    return "\nConfigs:\n" + "\n".join(lines)


if __name__ == "__main__":
    __doc__ += _configs()
    app.run(main, flags_parser=_parse_flags)
