"""Contenders in a process of their own, which run when they are told to.

It reads a line of JSON from its input, ``{"command": .., "name": ..}``, and answers with one:

* ``prepare``: build, compile and run once -> the peak memory beyond the inputs, and a fingerprint of the results
* ``save``: the results of the last batch and head, as .npz in ``path``
* ``run``: run for at least a fifth of a second -> the median and the minimum of the times of one call
"""

import contextlib
import ctypes
import functools
import importlib.metadata
import json
import math
import os
import resource
import statistics
import sys
import time
import traceback

import numpy as np

from attnorm.bench import contenders

_SECONDS_PER_TURN = 0.2
# Where calls are queued on a device, so many are timed together that the time to queue one is hidden.
_SECONDS_IN_QUEUE = 0.01


def main(specification: str) -> None:
    # Whatever a library prints goes to the terminal; the answers have the pipe for themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = json.loads(specification)
    case, threads = contenders.Case(**settings["case"]), settings["threads"]
    if threads and hasattr(
        os, "sched_setaffinity"
    ):  # before XLA counts the cores; other systems use all of them
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    for name in settings["names"]:
        with contextlib.suppress(
            Exception
        ):  # it comes again, and is reported, when the contender is prepared
            _load(name)
    running = {}
    for line in sys.stdin:
        request = json.loads(line)
        name, command = request.pop("name"), request.pop("command")
        try:
            if command == "prepare":
                running[name] = Contender(name, case, threads)
            answer = getattr(running[name], command)(**request)
        except Exception as error:  # the parent reports it, and goes on with the others
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


class Contender:
    def __init__(self, name: str, case: contenders.Case, threads: int | None):
        self._name, self._case, self._threads = name, case, threads
        self._version = _load(name)

    def prepare(self) -> dict:
        self._call, compiled_bytes = contenders.prepare(self._name, self._case, self._threads)
        before = _start_peak()
        results = self._run()
        peak = _peak() - before
        if self._case.device != "cpu":
            assert compiled_bytes is not None  # there, all is JAX's
            peak = compiled_bytes
        fingerprint = [float(np.mean(np.abs(_to_numpy(x)))) for x in results]
        return {"peak_extra_bytes": max(peak, 0), "fingerprint": fingerprint, "versions": self._version}

    def save(self, path: str) -> dict:
        results = [_to_numpy(x) for x in self._run()]
        if self._name == "torch":
            results = [x.swapaxes(1, 2) for x in results]
        np.savez(path, *(x[-1, :, -1] for x in results))
        return {}

    def run(self) -> dict:
        times: list[float] = []
        calls = 1
        if self._case.device != "cpu":
            calls = math.ceil(_SECONDS_IN_QUEUE / self._time(1))
        while sum(times) * calls < _SECONDS_PER_TURN:
            times.append(self._time(calls))
        return {"seconds": statistics.median(times), "minimum": min(times)}

    def _time(self, calls):
        start = time.perf_counter()
        self._run(calls)
        return (time.perf_counter() - start) / calls

    def _run(self, calls=1):
        for _ in range(calls):
            results = self._call()
        for x in results:
            if hasattr(x, "block_until_ready"):
                x.block_until_ready()
        return results


@functools.cache
def _load(name: str) -> dict[str, str]:
    """Import the library with its thread pools, so that they do not count as memory of the attention."""
    if name == "torch":
        import torch

        torch.ones(64, 64) @ torch.ones(64, 64)
        return {"torch": torch.__version__}
    import jax
    import jax.numpy as jnp
    import jaxlib

    jnp.matmul(jnp.ones((512, 512)), jnp.ones((512, 512))).block_until_ready()
    versions = {"jax": jax.__version__, "jaxlib": jaxlib.__version__}
    if name == "tokamax":
        versions[name] = importlib.metadata.version(name)
    return versions


def _to_numpy(x) -> np.ndarray:
    return (x.detach().float().numpy() if hasattr(x, "detach") else np.asarray(x)).astype(np.float32)


def _start_peak() -> int:
    """Bytes in use now, from which on the peak counts."""
    try:
        # Pages that the compiler freed would otherwise be reused without being counted again.
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # Linux: forget the peak so far
    except (OSError, AttributeError):
        pass
    return _peak()


def _peak() -> int:
    try:
        with open("/proc/self/status") as file:
            (line,) = (line for line in file if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except OSError:  # not Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    main(sys.argv[1])
