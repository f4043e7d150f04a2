"""Metrics: rows that survive a kill, their copies for spreadsheets and TensorBoard, and progress with ETA.

A row is a flat mapping with a "step". Keys that start with ``wall/`` are measured times; every other value is the
same, bit for bit, in a run that was killed and resumed and in one that was not.
"""

import csv
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tqdm
from tensorboardX import SummaryWriter

from attnorm.training.workdir import EVALUATIONS, METRICS, METRICS_CSV, TENSORBOARD, write_atomically

Row = Mapping[str, Any]


class RowLog:
    """A JSON Lines file of rows in order of step, of which those after a restored step are dropped.

    >>> import pathlib, tempfile
    >>> from attnorm.training.metrics import RowLog
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "rows.jsonl"
    >>> log = RowLog(path, restored_step=0)
    >>> for step in (1, 2, 3):
    ...     log.append({"step": step})
    >>> log.close()
    >>> RowLog(path, restored_step=2).rows
    [{'step': 1}, {'step': 2}]
    """

    def __init__(self, path: Path, restored_step: int):
        self.rows = [row for row in read_rows(path) if row["step"] <= restored_step]
        write_atomically(path, "".join(map(_line, self.rows)))
        self._file = open(path, "a", encoding="utf-8")

    def append(self, row: Row) -> None:
        self.rows.append(dict(row))
        self._file.write(_line(row))
        self._file.flush()

    def sync(self) -> None:
        """Returns when the rows are on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


class CsvLog:
    """The same rows as a table; the first row's keys are its columns."""

    def __init__(self, path: Path, rows: list[Row]):
        path.unlink(missing_ok=True)
        self._file = open(path, "a", encoding="utf-8", newline="")
        self._writer = None
        for row in rows:
            self.append(row)

    def append(self, row: Row) -> None:
        if self._writer is None:
            self._writer = csv.DictWriter(self._file, list(row), lineterminator="\n")
            self._writer.writeheader()
        self._writer.writerow(row)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardLog:
    """Every key with a slash, as a scalar."""

    def __init__(self, path: Path, restored_step: int):
        self._writer = SummaryWriter(str(path), purge_step=restored_step + 1)

    def append(self, row: Row) -> None:
        for key, value in row.items():
            if "/" in key:
                self._writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        self._writer.close()


class Progress:
    """A bar on a terminal, plain lines elsewhere, both with the time left."""

    def __init__(self, step: int, num_steps: int, enabled: bool = True):
        self.num_steps = num_steps
        self._enabled = enabled
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm.tqdm(total=num_steps, initial=step, unit="step", dynamic_ncols=True)
        self.restart_clock(step)

    def restart_clock(self, step: int) -> None:
        """Forgets the pace so far, which compilation and evaluation have slowed."""
        self._clock_step, self._clock = step, time.monotonic()

    def step(self, step: int, message: str | None) -> None:
        """Call at each step; the message, if any, is shown."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            if message:
                self._bar.set_postfix_str(message)
        elif message and self._enabled:
            done = step - self._clock_step
            left = (time.monotonic() - self._clock) / done * (self.num_steps - step) if done else None
            eta = "" if left is None else f"  ETA {tqdm.tqdm.format_interval(left)}"
            print(f"step {step}/{self.num_steps}  {message}{eta}", flush=True)

    def print(self, text: str) -> None:
        if self._enabled:
            tqdm.tqdm.write(text)
            sys.stdout.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


class Recorder:
    """All of the above for one run. Only the main process of a cluster writes.

    Args:
      restored_step: rows after it are dropped.
      num_steps: the step at which the run ends.
    """

    def __init__(self, workdir: Path, restored_step: int, num_steps: int, is_main: bool):
        self.progress = Progress(restored_step, num_steps, enabled=is_main)
        self._is_main = is_main
        self._start = time.monotonic()
        if is_main:
            self._metrics = RowLog(workdir / METRICS, restored_step)
            self._evaluations = RowLog(workdir / EVALUATIONS, restored_step)
            self._metrics_csv = CsvLog(workdir / METRICS_CSV, self._metrics.rows)
            self._tensorboard = TensorBoardLog(workdir / TENSORBOARD, restored_step)

    @property
    def evaluations(self) -> list[dict[str, Any]]:
        return self._evaluations.rows

    def add_metrics(self, row: Row) -> None:
        """Appends a row of training metrics, and to it the time since this process began to train."""
        row = {**row, "wall/seconds": time.monotonic() - self._start}
        if self._is_main:
            for log in (self._metrics, self._metrics_csv, self._tensorboard):
                log.append(row)

    def add_evaluation(self, row: Row) -> None:
        if self._is_main:
            for log in (self._evaluations, self._tensorboard):
                log.append(row)

    def sync(self) -> None:
        """Returns when all rows are on disk."""
        if self._is_main:
            self._metrics.sync()
            self._evaluations.sync()

    def close(self) -> None:
        self.progress.close()
        if self._is_main:
            for log in (self._metrics, self._evaluations, self._metrics_csv, self._tensorboard):
                log.close()


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file, none if it is missing, without a last line that a kill cut off."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return [json.loads(line) for line in lines]


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"
