"""Runs the contenders of a case in turns, never two at a time, and compares them round by round.

A machine's speed drifts; two times taken in the same round have met the same drift. So a comparison is the
median over rounds of the ratio within a round, and every second round goes through the contenders backwards.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from attnorm.bench.contenders import PEERS, Case


def run_case(
    case: Case, names: Sequence[str], rounds: int, threads: int, progress: Callable[[str], None]
) -> dict:
    """Measure the contenders on one case.

    Returns:
      The case, and by contender: ``results`` (seconds of each round and their median, peak memory in bytes
      beyond the inputs), ``speed_over`` (how many times as fast as each peer), ``failures`` (the reason).
    """
    results, failures, versions = {}, {}, {}
    with ExitStack() as stack:
        workers = {name: stack.enter_context(_Worker(name, case, threads)) for name in names}
        for name, worker in workers.items():
            progress(f"{case}: preparing {name}")
            try:
                answer = worker.ask("prepare")
            except WorkerError as error:
                failures[name] = str(error)
                continue
            versions |= answer.pop("versions")
            results[name] = {**answer, "seconds": []}
        for number in range(rounds):
            progress(f"{case}: round {number + 1} of {rounds}")
            running = [name for name in names if name not in failures]
            for name in running if number % 2 == 0 else reversed(running):
                try:
                    results[name]["seconds"].append(workers[name].ask("run")["seconds"])
                except WorkerError as error:
                    failures[name] = str(error)
    for name in failures:
        results.pop(name, None)
    for result in results.values():
        result["median_seconds"] = statistics.median(result["seconds"])
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


class WorkerError(Exception):
    """A contender failed or died."""


class _Worker:
    """The other end of :mod:`attnorm.bench.worker`; leaving the context ends the process."""

    def __init__(self, name: str, case: Case, threads: int):
        specification = json.dumps({"name": name, "case": case.asdict(), "threads": threads})
        self._process = subprocess.Popen(
            [sys.executable, "-m", "attnorm.bench.worker", specification],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(threads)},
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()

    def ask(self, command: str) -> dict:
        try:
            print(command, file=self._process.stdin, flush=True)
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
