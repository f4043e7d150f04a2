"""Metrics: rows that survive a kill, their copies for spreadsheets and TensorBoard, and progress with ETA.

A row is a flat mapping with a "step". Keys that start with ``wall/`` are measured times; every other value is the
same, bit for bit, in a run that was killed and resumed and in one that was not.
"""

import csv
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tqdm
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.record_writer import RecordWriter
from tensorboardX.summary import scalar

from attnorm.training.workdir import (
    EVALUATIONS,
    METRICS,
    METRICS_CSV,
    TENSORBOARD,
    WorkdirError,
    write_atomically,
)

Row = Mapping[str, Any]
_PLACE = {"step", "stage", "length", "is_end_of_stage"}  # the keys that say where in the run a row is


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
    """The same rows as a table; a column for every key of any row."""

    def __init__(self, path: Path, rows: Sequence[Row]):
        self._file = open(path, "w", encoding="utf-8", newline="")
        self._rows: list[Row] = []
        self._columns: dict[str, None] = {}
        for row in rows:
            self.append(row)

    def append(self, row: Row) -> None:
        self._rows.append(row)
        missing = [key for key in row if key not in self._columns]
        if missing:
            # Written again: where a run goes on, more may be measured than where it was begun.
            self._columns |= dict.fromkeys(missing)
            self._file.truncate(0)
            self._file.seek(0)
        writer = csv.DictWriter(self._file, list(self._columns), lineterminator="\n")
        if missing:
            writer.writeheader()
        writer.writerows(self._rows if missing else [row])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class TensorBoardLog:
    """What a row measures, as scalars. A file of its own for each start; TensorBoard reads them in order.

    tensorboardX's SummaryWriter keeps rows in a queue that cannot be waited for, and a kill would lose them.
    """

    def __init__(self, path: Path, restored_step: int):
        path.mkdir(exist_ok=True)
        self._writer = RecordWriter(str(path / f"events.out.tfevents.{time.time_ns()}"))
        self._write(Event(wall_time=time.time(), file_version="brain.Event:2"))
        # TensorBoard hides the later steps of the files before this one.
        start = SessionLog(status=SessionLog.START)
        self._write(Event(wall_time=time.time(), step=restored_step + 1, session_log=start))

    def append(self, row: Row) -> None:
        """Returns when the row is on disk."""
        summary = Summary()
        for key, value in row.items():
            if key not in _PLACE:
                summary.MergeFrom(scalar(key, value))
        self._write(Event(wall_time=time.time(), step=row["step"], summary=summary))

    def _write(self, event: Event) -> None:
        self._writer.write(event.SerializeToString())
        self._writer.flush()

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
    """The rows of a JSON Lines file, none if it is missing, without a last line that a kill cut off.

    Raises:
      WorkdirError: another line is not a row.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError:
            row = None
        if not isinstance(row, dict) or type(row.get("step")) is not int:
            raise WorkdirError(
                f"{path}, line {number} is damaged: {line[:60].decode('utf-8', 'replace')!r}. Restore the file, or "
                "choose another --workdir."
            )
        rows.append(row)
    return rows


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"
