"""The report on sequences that are split over devices."""

import importlib.util
import json
import os
import subprocess
import sys
import types

import pytest

from attnorm.bench import context
from attnorm.bench.__main__ import main


def test_a_program_that_waits_or_gathers_is_a_failure():
    sent = dict(
        sent_bytes={"collective-permute": 8, "all-gather": 1}, largest_bytes=5000, overlapped_in_loops=[1, 3]
    )
    faults = context._faults("ring", sent, length=1)
    assert faults == [
        "sends 5000 bytes at once, all keys in float32 have 1024",
        "has all-gather",
        "waits for 2 of the 3 transfers in loops",
    ]
    assert context._faults("all_gather", sent, length=1) == faults[:1]


class EmptyProgram:
    """What compiles, and does nothing."""

    def memory_analysis(self):
        names = ("argument", "output", "temp")
        return types.SimpleNamespace(**{f"{name}_size_in_bytes": 0 for name in names})

    def as_text(self):
        return "HloModule empty"


def test_what_a_variant_does_not_serve_is_told_and_what_none_serves_is_a_failure(monkeypatch):
    def compile_some(devices, length, sizes, normalizer, variant, *_):
        if normalizer == "l2":
            raise RuntimeError("no")
        if normalizer == "ssmax" or variant == "ring":
            raise NotImplementedError(f"{variant} refuses")
        return EmptyProgram()

    monkeypatch.setattr(context, "tpu_devices", lambda topology: [0, 1])
    monkeypatch.setattr(context, "_compile", compile_some)
    told = []
    result = context.compile_only("v5e:2x2", 2, 8, ["alibi"], told.append)
    assert result["failures"] == [] and "alibi, ring, 2 devices: ring refuses" in told
    assert [program["variant"] for program in result["programs"]] == ["all_gather"] * 2
    assert len(context.compile_only("v5e:2x2", 2, 8, ["l2"], told.append)["failures"]) == 4
    result = context.compile_only("v5e:2x2", 2, 8, ["alibi", "ssmax"], told.append)
    assert result["failures"] == ["ssmax: no program serves it: ring refuses; all_gather refuses"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--context", "0"], "--context: a positive whole number is wanted, got '0'"),
        (["--context", "2", "--device", "gpu"], "--context: has no meaning with --device"),
        (["--context", "2", "--static-cycles", "v5e"], "--context: has no meaning with --static-cycles"),
        (["--context", "2", "--rounds", "3"], "--rounds: has no meaning with --context"),
        (["--context", "2", "--lengths", "8", "16"], "--lengths: one is wanted with --context"),
        (["--context", "2", "--topology", "v5e:2x2"], "--topology: has no meaning with --context"),
        (
            ["--context", "3", "--compile-only", "--topology", "v5e:2x2"],
            "--context: an even number is wanted",
        ),
        (["--context", "2", "--compile-only"], "--topology: a name such as v5e:2x2 is wanted, got None"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def run(*arguments):
    command = [sys.executable, "-m", "attnorm.bench", *arguments]
    flags = (
        f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"  # compiles for the CPU fast
    )
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, "XLA_FLAGS": flags})


@pytest.mark.slow
def test_results_on_virtual_devices_are_those_of_one(tmp_path):
    out = tmp_path / "context.json"
    process = run("--context", "4", "--lengths", "256", "--normalizers", "l2", "entmax15", "--out", str(out))
    assert process.returncode == 0, process.stderr
    programs = json.loads(out.read_text())["programs"]
    # A ring does not serve entmax; that is told, and no failure.
    assert [(x["normalizer"], x["variant"]) for x in programs] == [
        ("l2", "ring"),
        ("l2", "all_gather"),
        ("entmax15", "all_gather"),
    ]
    assert "needs level" in process.stderr
    assert all(0 < max(program["errors"].values()) < 1e-5 for program in programs)
    sent, block = programs[0]["sent_bytes"], 256 // 4 * 64 * 4
    # Keys and values 3 times forward and backward, their gradients 5 times; and, for zigzag order, one block
    # in halves of queries (2 heads), keys and values there and back with their gradients, and of the output
    # and its own.
    assert sent == {"collective-permute": block * (2 * (3 + 3 + 5) + 2 * (2 + 1 + 1 + 2))}
    assert programs[1]["sent_bytes"].keys() >= {"all-gather"}


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="needs libtpu")
def test_transfers_run_beside_kernels_on_a_tpu(tmp_path):
    out = tmp_path / "context.json"
    arguments = ["--context", "4", "--compile-only", "--topology", "v5e:2x2", "--lengths", "32768"]
    process = run(*arguments, "--out", str(out))
    assert process.returncode == 0, process.stdout + process.stderr
    rings = [x for x in json.loads(out.read_text())["programs"] if x["variant"] == "ring"]
    assert [x["devices"] for x in rings] == [2, 4]
    overlapped, count = rings[1]["overlapped_in_loops"]  # with two devices the loop has one step, and is none
    assert overlapped == count == 6  # keys and values; in the backward pass also the gradients of both
    assert "MiB" in process.stdout
