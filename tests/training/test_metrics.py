"""Rows survive a kill, and each step appears once after a resume."""

import csv
import struct

import pytest
from tensorboardX.proto.event_pb2 import Event

from attnorm.training.metrics import Recorder, RowLog, read_rows
from attnorm.training.workdir import WorkdirError


def record(workdir, restored_step, steps):
    recorder = Recorder(workdir, restored_step, num_steps=10, is_main=True)
    for step in steps:
        recorder.add_metrics({"step": step, "loss/a": 1 / step})
        if step % 2 == 0:
            recorder.add_evaluation({"step": step, "mse/a": 2 / step})
    recorder.sync()
    recorder.close()


def test_a_resume_writes_every_later_row_again_and_no_row_twice(tmp_path):
    record(tmp_path, 0, [1, 2, 3, 4, 5])
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 6, "loss/a": 0.1')  # a kill cut this line off
    record(tmp_path, 3, [4, 5, 6])
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["loss/a"]) for row in rows] == [(step, 1 / step) for step in range(1, 7)]
    assert [row["step"] for row in read_rows(tmp_path / "evaluations.jsonl")] == [2, 4, 6]
    with open(tmp_path / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [{key: float(value) for key, value in row.items()} for row in table] == rows
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_run_goes_on_where_more_is_measured(tmp_path):
    record(tmp_path, 0, [1, 2])
    recorder = Recorder(tmp_path, 2, num_steps=10, is_main=True)
    recorder.add_metrics({"step": 3, "loss/a": 1 / 3, "wall/mfu": 0.5})
    recorder.add_metrics({"step": 4, "loss/a": 1 / 4})
    recorder.close()
    with open(tmp_path / "metrics.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["step"], row["wall/mfu"]) for row in table] == [
        ("1", ""),
        ("2", ""),
        ("3", "0.5"),
        ("4", ""),
    ]
    assert [float(row["loss/a"]) for row in table] == [1 / step for step in range(1, 5)]


def test_only_the_main_process_writes(tmp_path):
    recorder = Recorder(tmp_path, 0, num_steps=10, is_main=False)
    recorder.add_metrics({"step": 1, "loss/a": 1.0})
    recorder.add_evaluation({"step": 1, "mse/a": 1.0})
    recorder.sync()
    recorder.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("line", ['{"st', "", "5", '{"loss/a": 1}', "\xff"])
def test_a_broken_line_before_the_last_is_an_error(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 3}\n', encoding="latin-1")
    before = path.read_bytes()
    with pytest.raises(WorkdirError, match=r"rows\.jsonl, line 2 is damaged"):
        RowLog(path, restored_step=3)
    assert path.read_bytes() == before


def scalars(directory):
    """``{tag: {step: value}}`` as TensorBoard shows it: a restart hides the steps from its own on."""
    shown = {}
    for path in sorted(directory.iterdir()):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("Q", data[:8])
            event = Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            if event.HasField("session_log"):
                for steps in shown.values():
                    for step in [step for step in steps if step >= event.step]:
                        del steps[step]
            for value in event.summary.value:
                shown.setdefault(value.tag, {})[event.step] = value.simple_value
    return shown


def test_tensorboard_has_every_row_that_was_synced_though_nothing_is_closed(tmp_path):
    recorder = Recorder(tmp_path, 0, num_steps=10, is_main=True)
    for step in range(1, 6):
        recorder.add_metrics({"step": step, "learning_rate": 0.5, "loss/lp(p=2)/seed0": 1 / step})
    recorder.sync()
    shown = scalars(tmp_path / "tensorboard")
    assert shown.keys() == {"learning_rate", "loss/lp_p_2_/seed0", "wall/seconds"}
    assert shown["learning_rate"] == {step: 0.5 for step in range(1, 6)}
    assert scalars(tmp_path / "tensorboard")["loss/lp_p_2_/seed0"] == pytest.approx(
        {step: 1 / step for step in range(1, 6)}
    )
    resumed = Recorder(tmp_path, 3, num_steps=10, is_main=True)
    resumed.add_metrics({"step": 4, "loss/lp(p=2)/seed0": 9.0})
    resumed.sync()
    assert scalars(tmp_path / "tensorboard")["loss/lp_p_2_/seed0"] == pytest.approx(
        {1: 1, 2: 1 / 2, 3: 1 / 3, 4: 9}
    )
    recorder.close()
    resumed.close()
