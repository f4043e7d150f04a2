"""Rows survive a kill, and each step appears once after a resume."""

import csv
import json

import pytest

from attnorm.training.metrics import Recorder, RowLog, read_rows


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


def test_only_the_main_process_writes(tmp_path):
    recorder = Recorder(tmp_path, 0, num_steps=10, is_main=False)
    recorder.add_metrics({"step": 1, "loss/a": 1.0})
    recorder.add_evaluation({"step": 1, "mse/a": 1.0})
    recorder.sync()
    recorder.close()
    assert not list(tmp_path.iterdir())


def test_a_broken_line_before_the_last_is_an_error(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(json.JSONDecodeError):
        RowLog(path, restored_step=3)
