"""Runs the contenders of a case in turns, never two at a time, and compares them round by round.

A machine's speed drifts; two times taken in the same round have met the same drift. So a comparison is the
median over rounds of the ratio within a round, and every second round goes through the contenders backwards.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import attnorm
from attnorm.bench import check
from attnorm.bench.contenders import DEVICES, PEERS, Case, normalizer_of


def run_case(
    case: Case,
    names: Sequence[str],
    rounds: int,
    threads: int | None,
    progress: Callable[[str], None],
    *,
    checked: bool = False,
    torch_python: str | None = None,
) -> dict:
    """Measure the contenders on one case; with ``checked``, those alone whose results are right.

    Returns:
      The case, and by contender: ``results`` (seconds of each round, their median and minimum, peak memory in bytes
      beyond the inputs), ``speed_over`` (how many times as fast as each peer), ``failures`` (the reason).
    """
    results: dict[str, dict] = {}
    failures: dict[str, str] = {}
    versions: dict[str, str] = {}
    with ExitStack() as stack:
        workers = _start(stack, case, names, threads, torch_python)
        for name, worker in workers.items():
            progress(f"{case}: preparing {name}")
            try:
                answer = worker.ask("prepare", name)
                versions |= answer.pop("versions")
                results[name] = {**answer, "seconds": [], "minima": []}
                if checked:
                    progress(f"{case}: checking {name}")
                    results[name]["errors"] = _checked(worker, name, case)
            except (WorkerError, check.WrongResult) as error:
                failures[name] = str(error)
        for number in range(rounds):
            progress(f"{case}: round {number + 1} of {rounds}")
            running = [name for name in names if name not in failures]
            for name in running if number % 2 == 0 else reversed(running):
                try:
                    answer = workers[name].ask("run", name)
                except WorkerError as error:
                    failures[name] = str(error)
                else:
                    results[name]["seconds"].append(answer["seconds"])
                    results[name]["minima"].append(answer["minimum"])
    for name in failures:
        results.pop(name, None)
    for result in results.values():
        result["median_seconds"] = statistics.median(result["seconds"])
        result["minimum_seconds"] = min(result.pop("minima"))
    return {
        **case.asdict(),
        "results": results,
        "speed_over": {
            name: {peer: speed_ratio(results[name], results[peer]) for peer in PEERS if peer in results}
            for name in results
        },
        "failures": failures,
        "versions": versions,
    }


def speed_ratio(result: dict, other: dict) -> float:
    """How many times as fast as the other: the median over rounds of the ratio of times.

    >>> speed_ratio({"seconds": [1.0, 10.0, 1.0]}, {"seconds": [2.0, 30.0, 4.0]})
    3.0
    """
    pairs = zip(result["seconds"], other["seconds"], strict=True)
    return statistics.median(theirs / ours for ours, theirs in pairs)


def _start(stack, case, names, threads, torch_python):
    """A process for every contender, or one for all where a device admits no more."""

    def start(names, python=sys.executable):
        return stack.enter_context(_Worker(names, case, threads, python))

    if DEVICES[case.device].one_process:
        return dict.fromkeys(names, start(names))
    return {
        name: start([name], torch_python or sys.executable) if name == "torch" else start([name])
        for name in names
    }


def _checked(worker, name, case):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.npz"
        worker.ask("save", name, path=str(path))
        return check.errors(path, case, normalizer_of(name))


class WorkerError(Exception):
    """A contender failed or died."""


class _Worker:
    """The other end of :mod:`attnorm.bench.worker`; leaving the context ends the process."""

    def __init__(self, names: Sequence[str], case: Case, threads: int | None, python: str):
        specification = json.dumps({"names": names, "case": case.asdict(), "threads": threads})
        # Another interpreter finds the same attnorm; contenders on a GPU share its memory.
        environment = {
            "PYTHONPATH": os.pathsep.join(
                [str(Path(attnorm.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            ),
            "JAX_PLATFORMS": DEVICES[case.device].platform,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        }
        if threads:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._process = subprocess.Popen(
            [python, "-m", "attnorm.bench.worker", specification],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def ask(self, command: str, name: str, **arguments) -> dict:
        assert self._process.stdin and self._process.stdout  # pipes, both
        request = json.dumps({"command": command, "name": name, **arguments})
        try:
            print(request, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            pass  # it has died; the empty answer says so
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            reason = f"killed by signal {-code}, out of memory?" if code < 0 else f"exit status {code}"
            raise WorkerError(f"the process ended ({reason})")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer
