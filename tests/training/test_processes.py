"""Several processes over gloo: the same losses as one, a stop that all agree on, and a process that dies."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from attnorm.training import loop
from attnorm.training.tasks import TASKS

ROOT = Path(__file__).parents[2]
COUNTING = [
    "train.py",
    "--config=configs/counting.py:runlocal",
    "--config.counting.num_stages=1",
    "--config.counting.steps_per_stage=400",
    "--config.ensemble.normalizers=('lp(p=2)',)",
    "--config.checkpoint_every=5",
]
pytestmark = pytest.mark.slow


def start(num_processes, devices_each, *command):
    """The processes; each writes both its streams to one pipe."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices_each}"
    processes = []
    for index in range(num_processes):
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
            "XLA_FLAGS": flags,
        }
        if num_processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(num_processes),
                "JAX_PROCESS_ID": str(index),
            }
        processes.append(
            subprocess.Popen(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    return processes


def finish(processes, timeout=240):
    """Return codes and outputs."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], outputs


def losses(workdir):
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [[x for key, x in row.items() if key.startswith(("loss", "gradient_norm"))] for row in rows]


def committed(workdir):
    return {int(path.name) for path in (workdir / "checkpoints").glob("*") if path.name.isdigit()}


def wait_for_checkpoint(processes, workdir):
    while not committed(workdir):
        assert all(process.poll() is None for process in processes), finish(processes)
        time.sleep(0.05)


def test_two_processes_stop_together_and_one_goes_on_with_the_losses_of_one(
    tmp_path, toy, monkeypatch, capsys
):
    """Batches from the host; the run is stopped on a mesh of two processes and ends on another of one."""
    processes = start(2, 2, "tests/training/toy.py", tmp_path / "run", "600", "data=2", "fsdp=2")
    wait_for_checkpoint(processes, tmp_path / "run")
    processes[1].send_signal(signal.SIGTERM)
    codes, outputs = finish(processes)
    assert codes == [0, 0], outputs
    assert all(output.splitlines()[-1] == "stopped" for output in outputs)
    step = max(committed(tmp_path / "run"))
    assert f"interrupted after step {step}" in outputs[0]
    assert step < 600
    monkeypatch.setitem(TASKS, "toy", toy.ToyTask)
    for workdir in ("run", "whole"):
        assert loop.run(toy.long_config(600), tmp_path / workdir)
    assert f"resuming after step {step}" in capsys.readouterr().out
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert len(found) == len(expected) == 61
    num_rows = step // 10 + 10  # some of them after the resume
    np.testing.assert_allclose(found[:num_rows], expected[:num_rows], rtol=1e-3)


def test_a_language_model_trains_alike_in_two_processes(tmp_path):
    config = ["--config=configs/lm.py:runlocal", "--config.lm.batch_size=8"]
    meshes = {"two": ["--config.mesh.data=2", "--config.mesh.fsdp=2"], "one": []}
    found = {}
    for index, (name, mesh) in enumerate(meshes.items()):
        processes = start(2 - index, 2, "train.py", *config, *mesh, f"--workdir={tmp_path / name}")
        codes, outputs = finish(processes)
        assert not any(codes), outputs
        rows = (tmp_path / name / "evaluations.jsonl").read_text().splitlines()
        found[name] = (
            losses(tmp_path / name),
            [
                value
                for key, value in json.loads(rows[-1]).items()
                if key.startswith(("loss/", "held_out_loss/"))
            ],
        )
    assert len(found["one"][0]) == 5 and len(found["one"][1]) == 8
    for two, one in zip(found["two"], found["one"], strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-3)


def test_when_a_process_dies_the_others_stop_and_nothing_is_lost(tmp_path):
    command = [*COUNTING, "--config.mesh.fsdp=2", "--config.mesh.tensor=2", f"--workdir={tmp_path / 'run'}"]
    processes = start(4, 1, *command)
    wait_for_checkpoint(processes, tmp_path / "run")
    dead = processes.pop()
    dead.kill()
    dead.communicate()
    codes, outputs = finish(processes)
    assert 0 not in codes
    for output in outputs:
        # The loop's message, or JAX's own where it was first to notice.
        assert "the same command resumes" in output or "JAX distributed service" in output, output
    step = max(committed(tmp_path / "run"))
    processes = [start(1, 1, *COUNTING, f"--workdir={tmp_path / name}")[0] for name in ("run", "whole")]
    codes, outputs = finish(processes)
    assert codes == [0, 0] and f"resuming after step {step}" in outputs[0]
    num_rows = 1 + min(step, 50) // 5  # of four processes, and before rounding tells
    found, expected = losses(tmp_path / "run"), losses(tmp_path / "whole")
    assert len(found) == len(expected) == 81
    np.testing.assert_allclose(found[:num_rows], expected[:num_rows], rtol=1e-3)
