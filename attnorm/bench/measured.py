"""Measures the contenders on the device of this machine, and holds our speed against the bars."""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from attnorm.bench import report
from attnorm.bench.contenders import DEVICES, PEERS, Case, fits
from attnorm.bench.runner import run_case

# Of the cores of a CPU, so that machines can be compared.
CPU_THREADS = 2


class NoDevice(Exception):
    """JAX finds no such device here."""


def device_kind(device: str) -> str:
    """What JAX calls the device, asked in a process of its own, which gives it free again.

    Raises:
      NoDevice: with the last line of what JAX says.
    """
    command = [sys.executable, "-c", "import jax; print(jax.devices()[0].device_kind)"]
    environment = os.environ | {"JAX_PLATFORMS": DEVICES[device].platform}
    answer = subprocess.run(command, capture_output=True, text=True, env=environment)
    if answer.returncode:
        raise NoDevice((answer.stderr.strip().splitlines() or ["no reason given"])[-1])
    return answer.stdout.strip().splitlines()[-1]


def run(
    device: str,
    cases: Sequence[Case],
    contenders: Sequence[str],
    rounds: int,
    progress: Callable[[str], None],
    *,
    checked: bool = False,
    torch_python: str | None = None,
    out: Path | None = None,
) -> dict:
    """The report; printed, and written to ``out``, after every case."""
    threads = CPU_THREADS if device == "cpu" else None
    settings = DEVICES[device]
    result = report.new_report(
        f"measured on {device}",
        heads=settings.heads,
        head_dim=settings.head_dim,
        tokens=settings.tokens,
        is_causal=True,
        threads=threads,
        rounds=rounds,
        checked=checked,
    )
    result["hardware"]["device"] = device_kind(device)
    result |= {"cases": [], "bars": []}
    for number, case in enumerate(cases, 1):
        names = [name for name in contenders if fits(name, case)]
        say = functools.partial(_prefixed, progress, f"[{number}/{len(cases)}] ")
        measured = run_case(case, names, rounds, threads, say, checked=checked, torch_python=torch_python)
        result["versions"] |= measured.pop("versions")
        result["cases"].append(measured)
        result["bars"] = [dataclasses.asdict(bar) for bar in bars(result["cases"])]
        print(table(measured), flush=True)
        if out:
            report.write(result, out)
    print("\n".join(["", *(str(bar) for bar in bars(result["cases"]))]).rstrip(), flush=True)
    return result


def _prefixed(progress, prefix, message):
    progress(prefix + message)


def table(case: dict) -> str:
    """One case as text: a line for each contender, a column for the speed over each peer."""
    peers = [peer for peer in PEERS if peer in case["results"]]
    rows = [["", "median ms", "least ms", *(f"speed ÷ {peer}" for peer in peers), "extra MB"]]
    for name, result in case["results"].items():
        speeds = (f"{case['speed_over'][name][peer]:.2f}" for peer in peers)
        memory = f"{result['peak_extra_bytes'] / 1e6:.0f}"
        times = (
            f"{1e3 * result[key]:.{1 if case['device'] == 'cpu' else 3}f}"
            for key in ("median_seconds", "minimum_seconds")
        )
        rows.append([name, *times, *speeds, memory])
    title = f"\n{case['direction'].replace('_', ' + ')}, {case['dtype']}, length {case['length']}"
    failures = [f"  {name}: failed, {reason}" for name, reason in case["failures"].items()]
    return "\n".join([report.table(title, rows), *failures])


# On CPU: least speed of L2 over that of PyTorch.
_SPEED_OVER_TORCH = {
    ("float32", "forward"): 0.85,
    ("float32", "forward_backward"): 0.85,
    ("bfloat16", "forward"): 0.95,
    ("bfloat16", "forward_backward"): 1.2,
}
_SPEED_OVER_JAX, _JAX_FROM_LENGTH = 4.5, 2048
_MEMORY_OVER_TORCH = 2.0
_CPU_LENGTHS = range(1024, 8192 + 1)
# On GPU.
_SPEED_OVER_CUDNN = 0.9


def bars(cases: Sequence[dict]) -> list[report.Bar]:
    """What is to hold, in the cases where both sides were measured."""
    result = []
    for case in cases:
        name = {"cpu": "chunked l2", "gpu": "pallas_gpu l2"}.get(case["device"])
        if name not in case["results"]:
            continue
        label = f"{case['direction']} {case['dtype']} {case['length']}, {name}"
        speed, length = case["speed_over"][name], case["length"]

        def at_least(peer, limit, label=label, speed=speed):
            if peer in speed:
                result.append(report.Bar(f"{label} speed ÷ {peer}", speed[peer], limit, at_least=True))

        if case["device"] == "gpu":
            at_least("cudnn", _SPEED_OVER_CUDNN)
        elif length in _CPU_LENGTHS:
            at_least("torch", _SPEED_OVER_TORCH[case["dtype"], case["direction"]])
            if length >= _JAX_FROM_LENGTH:
                at_least("jax.nn", _SPEED_OVER_JAX)
            if "torch" in speed and case["direction"] == "forward_backward":
                ours, theirs = (case["results"][x]["peak_extra_bytes"] for x in (name, "torch"))
                result.append(
                    report.Bar(f"{label} memory ÷ torch", ours / max(theirs, 1), _MEMORY_OVER_TORCH)
                )
    return result
