"""The running of cells: one after the other in this process, or side by side in several, each on a core of its own."""

import functools
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Hashable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Protocol

import jax

from attnorm.bench.report import new_report
from attnorm.lengthbench.cell import run_cell, settings_of
from attnorm.lengthbench.contenders import Contender
from attnorm.lengthbench.programs import Programs
from attnorm.lengthbench.store import cell_path, write_cell
from attnorm.lengthbench.suites import Suite
from attnorm.lengthbench.tasks import TASKS

Pair = tuple[str, Contender]  # a task, and what is to solve it


class Board(Protocol):
    """Who hears of what happens."""

    def started(self, pair: Pair) -> None: ...

    def advanced(self, pair: Pair, count: int, message: str | None) -> None:
        """So many updates more."""

    def ended(self, pair: Pair, error: str | None) -> None:
        """The cell is written; or it is not, and this is why."""


class Runner:
    """Runs cells and writes them. Those of one task that follow each other share what is compiled."""

    def __init__(self, suite: Suite, out: Any, command: str):
        self._suite, self._out, self._command = suite, out, command
        self._task: str | None = None
        self._programs: dict[Hashable, Programs] = {}

    def run(self, pair: Pair, progress: Callable[[int, str | None], None]) -> str | None:
        """None, or what went wrong: an error in one cell is none of the others'."""
        try:
            self._run(*pair, progress)
        except Exception:
            return traceback.format_exc()
        return None

    def _run(self, task, contender, progress):
        start = time.monotonic()
        spec = TASKS[task](self._suite.name)
        if task != self._task:
            self._task, self._programs = task, {}
        # What a program has of a contender is this alone; the normaliser is an argument.
        kind = contender.output, contender if contender.learned else None
        if kind not in self._programs:
            self._programs[kind] = Programs(spec.make(contender, self._suite), self._suite)
        results = run_cell(self._programs[kind], self._suite, contender, progress)
        made = new_report(
            "length benchmark",
            command=self._command,
            device=jax.devices()[0].device_kind,
            cores=len(cores()),
            seconds=round(time.monotonic() - start, 1),
        )
        cell = {
            "task": task,
            "contender": contender.name,
            "settings": settings_of(self._suite, spec),
            **results,
            "made": made,
        }
        write_cell(cell_path(self._out, task, contender.name), cell)


def cores() -> list[int]:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def run_here(pairs: Sequence[Pair], runner: Runner, board: Board) -> None:
    for pair in pairs:
        board.started(pair)
        board.ended(pair, runner.run(pair, functools.partial(board.advanced, pair)))


def run_apart(pairs: Sequence[Pair], runner: Runner, board: Board, num_processes: int) -> None:
    """The same in processes of their own, which have no more than a core each, and end with this one.

    A process that dies, for want of memory for example, takes its cell with it, and no other.
    """
    context = multiprocessing.get_context("spawn")  # a fork would have JAX's threads halfway
    waiting = list(pairs)
    working: dict[Connection, tuple[Pair, SpawnProcess, int]] = {}

    def start(core):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, runner, core), daemon=True)
        process.start()
        theirs.close()  # so that the end of the process is the end of the connection
        give(ours, process, core)

    def give(connection, process, core, last=None):
        if waiting:
            pair = _next(waiting, last, [each for each, _, _ in working.values()])
            waiting.remove(pair)
            working[connection] = pair, process, core
            board.started(pair)
            connection.send(pair)
        else:
            connection.close()

    own = cores()
    try:
        for index in range(min(num_processes, len(pairs))):
            start(own[index % len(own)])
        while working:
            ready = multiprocessing.connection.wait(list(working))
            for connection in [each for each in working if each in ready]:
                pair, process, core = working[connection]
                try:
                    count, message, is_end = connection.recv()
                except (EOFError, ConnectionError):
                    process.join()
                    del working[connection]
                    board.ended(pair, f"its process ended with exit code {process.exitcode}")
                    if waiting:
                        start(core)
                    continue
                if not is_end:
                    board.advanced(pair, count, message)
                    continue
                del working[connection]
                board.ended(pair, message)
                give(connection, process, core, last=pair)
    finally:
        for _, process, _ in working.values():
            process.terminate()
            process.join()


def _next(waiting: Sequence[Pair], last: Pair | None, elsewhere: Sequence[Pair]) -> Pair:
    """One for which the process has the programs; else one for which no other process is making them."""

    def cost(pair):
        if last is not None and _programs(pair) == _programs(last):
            return 0
        return 2 if _programs(pair) in map(_programs, elsewhere) else 1

    return min(waiting, key=cost)


@functools.cache
def _programs(pair: Pair) -> Hashable:
    task, contender = pair
    return task, contender.structure


def _serve(connection: Connection, runner: Runner, core: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process hears it, and ends this one
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {core})  # before JAX starts as many threads as there are cores
    try:
        while True:
            error = runner.run(connection.recv(), lambda *progress: connection.send((*progress, False)))
            connection.send((0, error, True))
    except (EOFError, ConnectionError):  # nothing more to do, or nobody to do it for
        pass
