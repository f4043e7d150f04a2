"""Trains the experiment that a config describes, or goes on with it where it was stopped.

    python train.py --workdir=runs/counting
    python train.py --workdir=/tmp/try --config=configs/counting.py:runlocal
    python train.py --workdir=runs/slow --config.optimizer.learning_rate=3e-4
    python train.py --aot=v5e:4x4 --config=configs/lm_1b.py

The workdir holds config.json, metrics.jsonl and .csv, tensorboard/, checkpoints/ and the results, of language models
also data.json, what their text was. Stop a run at any moment; the same command resumes it. --config.a.b=value changes
a value of the config. --profile_steps=10-12 writes a trace of these steps. --aot compiles the train step and the
evaluation for a TPU topology, of which nothing needs to be there but libtpu, and prints what they would take.
"""

import importlib.util
import os
import shlex
import signal
import sys

# Of the extra "train", what every run loads sooner or later.
_PACKAGES = "absl flax grain jax matplotlib ml_collections optax orbax tensorboardX tqdm".split()


def _stop(signum, frame) -> None:
    # Not sys.exit: the code that is interrupted, an import for example, may catch its exception.
    print(f"\nstopped with nothing left to save; go on with: {_command()}", flush=True)
    os._exit(0)


def _command() -> str:
    return shlex.join(sys.orig_argv)  # with the interpreter as it was typed, which may be in no PATH


if __name__ == "__main__":
    # Before the slow imports. The loop, which has something to save, has handlers of its own.
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f'error: not installed: {", ".join(missing)}; in the checkout: pip install --editable ".[train]"'
        )

import ast  # noqa: E402
import difflib  # noqa: E402
import logging  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import textwrap  # noqa: E402
from pathlib import Path  # noqa: E402

from absl import app, flags  # noqa: E402
from absl import logging as absl_logging  # noqa: E402
from ml_collections import config_flags  # noqa: E402
from ml_collections.config_flags import config_path  # noqa: E402

_ROOT = Path(__file__).resolve().parent


def main(argv: list[str]) -> None:
    show_own_warnings_only()
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


def show_own_warnings_only() -> None:
    """Unless --verbosity says what to show."""
    if not flags.FLAGS["verbosity"].present:
        # What the libraries' threads log as an error is raised too, and printed by `main` without its tracebacks.
        absl_logging.set_verbosity(absl_logging.FATAL)
        logging.getLogger("attnorm").setLevel(logging.WARNING)


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


def _parse_flags(argv: list[str], values: flags.FlagValues = flags.FLAGS) -> list[str]:
    try:
        # Defining the config flag reads the default file, and applies the overrides in argv to it.
        config_flags.DEFINE_config_file(
            "config",
            str(_ROOT / "configs" / "counting.py"),
            "The experiment: a file, and after a colon its arguments.",
            flag_values=values,
            sys_argv=argv,
        )
        for name, help_string in (
            ("workdir", "Where the run is kept. Required, but with --aot."),
            ("aot", "Compile for this TPU topology, such as v5e:4x4, and train nothing."),
            ("profile_steps", "Write a trace of these steps, such as 10-12."),
        ):
            flags.DEFINE_string(name, None, help_string, flag_values=values)
        if {"--help", "-help", "-h"} & set(argv):
            app.usage(shorthelp=True, writeto_stdout=True, exitcode=0)  # absl's own --help exits with 1
        arguments = values(argv)
        file = config_flags.get_config_filename(values["config"]).partition(":")[0]
        if not Path(file).is_file():
            _exit(f"--config must be a file such as configs/counting.py, got {file!r}{_hint(file)}")
        values.config.to_dict()  # raises if the file could not be read
    except (flags.Error, OSError) as error:
        # The last line of a traceback of the config file, without the name of the exception's class.
        _exit(re.sub(r"^[\w.]*ConfigError: ", "", str(error).strip().splitlines()[-1].strip()))
    except (AttributeError, KeyError) as error:
        overrides = [argument for argument in argv if argument.startswith("--config.")]
        while isinstance(error.args[0], Exception):  # one that wraps another
            error = error.args[0]
        _exit(f"unknown key in {' '.join(overrides)}: {'; '.join(error.args[0].splitlines())}")
    _refuse_numbers_for_tuples(argv, values.config)
    if arguments[1:]:
        _exit(f"unknown argument {arguments[1]!r}")
    if not values.workdir and not values.aot:
        _exit("--workdir is missing, for example --workdir=runs/counting")
    if "://" in (values.workdir or ""):
        _exit(f"--workdir must be a folder of a file system that is mounted, got {values.workdir}")
    return arguments


def _refuse_numbers_for_tuples(argv: list[str], config) -> None:
    """Else --config.ensemble.seeds=5, which may mean five seeds, would be the seed 5."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        flag, has_value, text = argument.partition("=")
        name, text = flag.lstrip("-"), text if has_value else following
        if flag.startswith("-") and name.startswith("config."):
            if isinstance(config_path.get_value(name.removeprefix("config."), config), tuple):
                if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?", text):
                    _exit(f"{name} must be a tuple, such as ({text},), got {text}")


def _hint(path: str) -> str:
    known = {f"configs/{found.name}": os.path.relpath(found) for found in _config_files()}
    near = difflib.get_close_matches(path, known, n=1)
    return f"; did you mean {known[near[0]]}?" if near else ""


def _exit(message: str) -> None:
    sys.exit(f"error: {message}\n(--help shows the flags and the configs)")


def _configs() -> str:
    """Each config with its purpose, and what may follow its colon."""
    width = min(shutil.get_terminal_size().columns, 110)
    lines = ["", "Configs; their arguments follow a colon, as in --config=configs/lm.py:runlocal,steps=100"]
    for path, (module, function) in _config_files().items():
        purpose = (ast.get_docstring(module) or "").partition("\n")[0]
        arguments = " ".join((ast.get_docstring(function) or "").replace("``", "").split())
        lines.append(f"  configs/{path.name}")
        for text in (purpose, arguments.replace("Arguments, after a colon:", "Arguments:")):
            lines += textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 8)
    return "\n".join(lines) + "\n"


def _config_files() -> dict[Path, tuple[ast.Module, ast.FunctionDef]]:
    """Of each file in configs/ that is one, its syntax tree and that of its function."""
    found = {}
    for path in sorted((_ROOT / "configs").glob("*.py")):
        module = ast.parse(path.read_text(encoding="utf-8"))
        functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
        if "get_config" in functions:
            found[path] = module, functions["get_config"]
    return found


if __name__ == "__main__":
    __doc__ += _configs()
    app.run(main, flags_parser=_parse_flags)
