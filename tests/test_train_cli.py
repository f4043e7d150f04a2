"""train.py as users run it: killed at any moment, stopped, and called with bad input."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import train
from attnorm.extras import install_hint

ROOT = Path(__file__).parents[1]
TINY = (
    "--config=configs/counting.py:runlocal",
    "--config.counting.steps_per_stage=40",
    "--config.checkpoint_every=2",
    "--config.log_every=3",
    "--config.eval_every=7",
)


def command(workdir, *arguments):
    return [sys.executable, "train.py", f"--workdir={workdir}", *arguments]


def run(workdir, *arguments, **kwargs):
    return subprocess.run(command(workdir, *arguments), cwd=ROOT, capture_output=True, text=True, **kwargs)


def start(workdir, *arguments):
    return subprocess.Popen(
        command(workdir, *arguments), cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def exact(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if not key.startswith("wall/")} for row in rows]
    return rows, (workdir / "results.csv").read_text(), (workdir / "evaluations.jsonl").read_text()


def committed(workdir):
    return {int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()}


def temporaries(workdir):
    return list((workdir / "checkpoints").glob("*.orbax-checkpoint-tmp"))


def kill(process):
    process.send_signal(signal.SIGKILL)
    process.wait()


def wait_for(process, condition):
    while not (found := condition()):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.001)
    return found


def kill_inside_a_save(workdir):
    """Kills the run so that a checkpoint is left that was begun but is not complete."""
    for _ in range(20):
        process = start(workdir, *TINY)
        reached = max(committed(workdir), default=0)
        wait_for(process, lambda reached=reached: max(committed(workdir), default=0) > reached)
        wait_for(process, lambda: temporaries(workdir))
        kill(process)
        if temporaries(workdir):
            break
    unfinished = {int(path.name.partition(".")[0]) for path in temporaries(workdir)}
    assert unfinished and not unfinished & committed(workdir)


@pytest.mark.slow
def test_killed_three_times_a_run_ends_as_if_nothing_had_happened(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    result = run(whole, *TINY)
    assert result.returncode == 0, result.stderr

    kill_inside_a_save(killed)
    for delay in random.sample([0.0, 0.1, 0.3, 0.6], 2):
        process = start(killed, *TINY)
        reached = max(committed(killed))
        wait_for(process, lambda reached=reached: max(committed(killed)) > reached)
        time.sleep(delay)
        kill(process)
        assert max(committed(killed)) < 80, "the run was over before it was killed"
    result = run(killed, *TINY)
    assert result.returncode == 0, result.stderr
    assert "resuming after step" in result.stdout
    assert not temporaries(killed)
    assert exact(killed) == exact(whole)
    assert max(committed(killed)) == 80

    again = run(killed, *TINY)
    assert again.returncode == 0
    assert "is finished (80 steps)" in again.stdout
    assert exact(killed) == exact(whole)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_saves_exits_with_0_and_says_how_to_go_on(tmp_path, signum):
    process = start(tmp_path / "run", *TINY)
    wait_for(process, lambda: (tmp_path / "run/checkpoints").is_dir() and committed(tmp_path / "run"))
    process.send_signal(signum)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    *_, before_last, last = output.splitlines()
    assert before_last.startswith("interrupted after step")
    step = int(before_last.split()[3])
    assert max(committed(tmp_path / "run")) == step
    assert last.startswith(f"resume with: {sys.executable} train.py --workdir={tmp_path}/run")


@pytest.mark.slow
def test_the_printed_command_resumes_though_no_python_is_in_the_path(tmp_path):
    """A virtual environment that is not activated, called by a relative path."""
    interpreter = os.path.relpath(sys.executable, ROOT)
    process = subprocess.Popen(
        [interpreter, *command(tmp_path / "a run", *TINY)[1:]], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    wait_for(process, lambda: (tmp_path / "a run/checkpoints").is_dir() and committed(tmp_path / "a run"))
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate()
    printed = output.splitlines()[-1].removeprefix("resume with: ")
    assert printed.startswith(f"{interpreter} train.py")
    nowhere = os.environ | {"PATH": ""}
    result = subprocess.run(
        printed, shell=True, executable="/bin/sh", cwd=ROOT, env=nowhere, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "resuming after step" in result.stdout and max(committed(tmp_path / "a run")) == 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--config.optimizer.learningrate=3",),
            "error: unknown key in --config.optimizer.learningrate=3: 'learningrate'; Did you mean "
            '"learning_rate" instead of "learningrate"?\n',
        ),
        (("--config.optimizer.zzz=3",), "error: unknown key in --config.optimizer.zzz=3: 'zzz'\n"),
        (("--config.ensemble.seeds=5",), "error: config.ensemble.seeds must be a tuple, such as (5,), got 5"),
        (("--config.ensemble.seeds", "5"), "error: config.ensemble.seeds must be a tuple, such as (5,)"),
        (("--config.ensemble.normalizers=('lp(p=-1)',)",), "'lp(p=-1)': p must be"),
        (
            ("--config=configs/countin.py:runlocal",),
            "error: --config must be a file such as configs/counting.py, got 'configs/countin.py'; "
            "did you mean configs/counting.py?",
        ),
        (
            ("--config=configs/counting.py:runloca",),
            "error: config argument 'runloca': unknown key 'runloca'; did you mean 'runlocal'?",
        ),
        (
            ("--config.ensemble.seeds=(2147483648,)",),
            "error: config.ensemble.seeds must be numbers from 0 to",
        ),
        (
            ("--profile_steps=3",),
            "error: profile_steps must be the first and last step, such as 10-12, got '3'",
        ),
        (
            ("--workdir=gs://bucket/run",),
            "error: --workdir must be a folder of a file system that is mounted",
        ),
    ],
)
def test_bad_input_is_an_error_that_names_it_and_writes_nothing(tmp_path, arguments, message):
    result = run(tmp_path / "run", *arguments)
    assert result.returncode == 1
    assert message in result.stderr
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("line", ["loading JAX", "stage 1 of 2"])
def test_a_run_stopped_while_it_starts_exits_with_0(tmp_path, signum, line):
    process = start(tmp_path / "run", *TINY)
    while not process.stdout.readline().startswith(line):
        pass
    process.send_signal(signum)
    output, _ = process.communicate()
    assert process.returncode == 0, output
    assert "Traceback" not in output
    assert f"with: {sys.executable} train.py --workdir={tmp_path}/run" in output.splitlines()[-1]


@pytest.mark.slow
def test_two_runs_in_one_workdir_are_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    first = start(tmp_path / "run", *TINY)
    wait_for(first, (tmp_path / "run/config.json").exists)
    second = run(tmp_path / "run", *TINY)
    assert first.poll() is None
    assert second.returncode == 1
    assert "is in use by another run" in second.stderr and "Traceback" not in second.stderr
    kill(first)
    result = run(tmp_path / "run", *TINY)
    assert result.returncode == 0, result.stderr


def test_help_lists_the_configs_and_their_arguments():
    helped = run("unused", "--help", env=os.environ | {"COLUMNS": "80"})
    assert helped.returncode == 0
    output = helped.stdout
    assert "--workdir" in output
    listed = output[output.index("Configs; their arguments") : output.index("\nflags:")].split("  configs/")[
        1:
    ]
    assert [text.split()[0] for text in listed] == sorted(path.name for path in ROOT.glob("configs/*.py"))
    for text in listed:
        assert " Arguments: " in text
        assert max(map(len, text.splitlines())) <= 80
    counting, lm = (
        " ".join(next(x for x in listed if x.startswith(name)).split()) for name in ("counting.py", "lm.py")
    )
    assert "Counting with L1, L2 and L4" in counting and "steps a stage, norm of the model." in counting
    assert "corpus, tokenizer, learning_rate, normalizer" in lm


def test_a_file_that_is_no_config_or_says_nothing_breaks_no_help(tmp_path, monkeypatch):
    (tmp_path / "configs").mkdir()
    monkeypatch.setattr(train, "_ROOT", tmp_path)
    for name, text in {
        "helpers": "SIZES = (1, 2)\n",
        "mute": "def get_config(argument=None):\n    pass\n",
        "told": '"""A purpose."""\ndef get_config(argument=None):\n    """Arguments, after a colon: ``steps``."""\n',
    }.items():
        (tmp_path / "configs" / f"{name}.py").write_text(text)
    *_, mute, told, purpose, arguments = train._configs().splitlines()
    assert (mute, told) == ("  configs/mute.py", "  configs/told.py")
    assert (purpose.strip(), arguments.strip()) == ("A purpose.", "Arguments: steps.")
    assert "helpers" not in train._configs()


LOGS = """
import logging
from absl import app
import train

def main(argv):
    train.show_own_warnings_only()
    logging.getLogger("attnorm.training.attention").warning("of this project")
    logging.getLogger("attnorm.attention").info("too much")
    logging.getLogger("orbax").error("of a library")

app.run(main)
"""


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ([], {"of this project"}),
        (["--verbosity=-2"], {"of a library"}),  # who asks for errors gets these
        (["--verbosity=0"], {"of this project", "of a library", "too much"}),
    ],
)
def test_warnings_of_this_project_are_shown_and_errors_of_libraries_are_not(arguments, shown):
    command = [sys.executable, "-c", LOGS, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert {
        text for text in ("of this project", "of a library", "too much") if text in result.stderr
    } == shown


def test_packages_that_are_missing_are_named_with_what_to_type():
    """-S hides everything that was installed."""
    result = subprocess.run([sys.executable, "-S", "train.py"], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.startswith("error: not installed: absl, ") and result.stderr.count("\n") == 1
    assert "ml_collections" in result.stderr and result.stderr.endswith(f"; {install_hint('train')}\n")


def test_no_message_installs_from_an_index_that_does_not_have_it():
    """The README knows one way, from a checkout; every other text says the same."""
    here = Path(__file__)
    files = [
        *ROOT.glob("*.*"),
        *(x for name in ("attnorm", "configs", "notebooks", "tests") for x in (ROOT / name).rglob("*.*")),
    ]
    texts = {x: x.read_text() for x in files if x.suffix in (".py", ".md", ".ipynb") and x != here}
    assert len(texts) > 100
    assert not [path for path, text in texts.items() if re.search("pip install ['\"]?attnorm", text)]


@pytest.mark.slow
def test_a_full_disk_is_an_error_that_loses_nothing(tmp_path):
    limited = ["bash", "-c", 'ulimit -f 6; exec "$@"', "bash", *command(tmp_path / "run", *TINY)]
    result = subprocess.run(limited, cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 1
    # Now and then a writing thread of tensorstore prints a traceback of its own, on either side of the error.
    assert "_SignalingThread" not in result.stderr and "save_finalize" not in result.stderr
    error = result.stderr[result.stderr.rindex("error: ") :]
    assert "File too large" in error and "the same command resumes" in error
    result = run(tmp_path / "run", *TINY)
    assert result.returncode == 0, result.stderr
