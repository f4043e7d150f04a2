"""The loop: how many steps, what is on disk, and what happens when a run is stopped, changed or fails."""

import csv
import functools
import json
import os
import shutil
import signal

import jax
import numpy as np
import pytest

import attnorm
from attnorm.data.counting import position_only_mse
from attnorm.training import loop, metrics, optimizer, throughput
from attnorm.training import workdir as files
from attnorm.training.checkpoint import Checkpointer
from attnorm.training.ensemble import make_groups
from attnorm.training.metrics import read_rows
from attnorm.training.setup import Setup
from attnorm.training.tasks.counting import CountingTask
from attnorm.training.workdir import WorkdirError

EXACT_FILES = ("results.csv", "evaluations.jsonl", "config.json")


def exact(workdir):
    """Everything that must be the same, bit for bit, in an interrupted run."""
    rows = read_rows(workdir / "metrics.jsonl")
    rows = [{key: value for key, value in row.items() if not key.startswith("wall/")} for row in rows]
    return rows, *((workdir / name).read_text() for name in EXACT_FILES)


def snapshot(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def checkpoint_steps(workdir):
    return sorted(int(path.name) for path in (workdir / "checkpoints").iterdir() if path.name.isdigit())


def final_state(config, workdir, step=12):
    like = Setup(*loop.parse_config(config)).abstract_state()
    return Checkpointer(workdir / "checkpoints", keep=10).restore(step, like=like)


def test_files_of_a_finished_run(tiny, finished_run):
    rows = read_rows(finished_run / "metrics.jsonl")
    # The first step of each stage, and every second.
    assert [row["step"] for row in rows] == [1, 2, 4, 6, 7, 8, 10, 12]
    assert [row["length"] for row in rows] == [4] * 4 + [8] * 4
    warm_up_and_cooldown = [0.5, 1, 1, 0.5]
    np.testing.assert_allclose(
        [row["learning_rate"] for row in rows], 3e-3 * np.array(warm_up_and_cooldown * 2)
    )
    evaluations = read_rows(finished_run / "evaluations.jsonl")
    assert [(row["step"], row["is_end_of_stage"]) for row in evaluations] == [
        (4, False), (6, True), (8, False), (12, True),
    ]  # fmt: skip
    assert checkpoint_steps(finished_run) == [3, 6, 9, 12]
    assert json.loads((finished_run / "config.json").read_text()) == json.loads(json.dumps(tiny))
    assert (finished_run / "length_generalization.png").read_bytes().startswith(b"\x89PNG")


def test_results(finished_run):
    with open(finished_run / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == "normalizer,p,seed,trained_length,prefix,mse,mae,floor,ratio".split(",")
    keys = [(row["normalizer"], row["p"], row["seed"], row["trained_length"], row["prefix"]) for row in rows]
    members = [("lp", "1.0"), ("lp", "2.0"), ("linf", "")]
    assert sorted(keys) == sorted(
        (*member, seed, length, prefix)
        for member in members
        for seed in "01"
        for length in "48"
        for prefix in ("2", "4", "8", "16")
    )
    for row in rows:
        floor = position_only_mse(int(row["prefix"]), vocab_size=4)
        assert float(row["floor"]) == floor
        assert float(row["ratio"]) == float(row["mse"]) / floor
        assert 0 < float(row["mae"]) <= float(row["mse"]) ** 0.5


def test_evaluation_is_the_error_of_the_final_state_on_each_prefix(tiny, finished_run):
    state = final_state(tiny, finished_run)
    config, task = loop.parse_config(tiny)
    (row,) = [row for row in read_rows(finished_run / "evaluations.jsonl") if row["step"] == 12]
    groups = make_groups(config.ensemble.normalizers, config.ensemble.seeds)
    member = jax.tree.map(lambda x: x[3], (state.params[0], state.model_state[0], groups[0].normalizer))
    params, model_state, normalizer = member
    attention = functools.partial(attnorm.dot_product_attention, normalizer=normalizer)
    assert groups[0].members[3].label == "lp(p=2)/seed1"
    squares = []
    for index in range(2):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 2), index)
        squares.append(task.evaluate(params, model_state, task.eval_batch(key, index), attention)["mse"])
    for prefix in (2, 4, 8, 16):
        expected = np.mean(np.array(squares)[:, :prefix])
        np.testing.assert_allclose(row[f"mse/{prefix}/lp(p=2)/seed1"], expected, rtol=1e-4)


def test_exactly_num_steps_updates_and_a_fresh_optimizer_in_each_stage(tiny, finished_run):
    state = final_state(tiny, finished_run)
    assert state.step == 12
    counts = [x for x in jax.tree.leaves(state.optimizer_state) if x.dtype == np.int32]
    assert counts and all(np.all(count == 6) for count in counts)


def test_an_optimizer_that_is_kept_has_seen_every_step(tiny, tmp_path):
    tiny["optimizer"]["reset_optimizer"] = False
    tiny["ensemble"].update(normalizers=("l2",), seeds=(0,))
    tiny["counting"]["steps_per_stage"] = 2
    assert loop.run(tiny, tmp_path / "run")
    counts = [
        x
        for x in jax.tree.leaves(final_state(tiny, tmp_path / "run", 4).optimizer_state)
        if x.dtype == np.int32
    ]
    assert counts and all(np.all(count == 4) for count in counts)


@pytest.mark.parametrize("restored_step", [3, 6, 9])
def test_a_resumed_run_is_bit_equal(tiny, finished_run, tmp_path, restored_step, monkeypatch):
    restarts = {metrics.Progress: [], throughput.Pace: []}
    for owner, name in ((metrics.Progress, "restart_clock"), (throughput.Pace, "restart")):
        restart = getattr(owner, name)

        def record(self, step, owner=owner, restart=restart):
            restarts[owner].append(step)
            restart(self, step)

        monkeypatch.setattr(owner, name, record)
    workdir = tmp_path / "run"
    shutil.copytree(finished_run, workdir)
    for step in checkpoint_steps(workdir):
        if step > restored_step:
            shutil.rmtree(workdir / "checkpoints" / str(step))
    (workdir / "results.csv").unlink()
    assert loop.run(tiny, workdir)
    assert exact(workdir) == exact(finished_run)
    states = (jax.device_get(final_state(tiny, path)) for path in (workdir, finished_run))
    jax.tree.map(np.testing.assert_array_equal, *states)
    # The steps that waited for a compilation tell no pace: the first, and that of the next stage.
    for step in {restored_step + 1, max(7, restored_step + 1)}:
        # An evaluation starts both clocks again, as a row of metrics does that of its pace.
        is_evaluated = step % tiny["eval_every"] == 0
        assert restarts[metrics.Progress].count(step) == 1 + is_evaluated
        assert restarts[throughput.Pace].count(step) == 2 + is_evaluated


def test_a_finished_run_rewrites_its_report_only(tiny, finished_run, tmp_path, capsys):
    workdir = tmp_path / "run"
    shutil.copytree(finished_run, workdir)
    report = (workdir / "results.csv").read_bytes()
    before = snapshot(workdir)
    (workdir / "results.csv").write_text("gone")
    assert loop.run(tiny, workdir)
    assert "is finished (12 steps)" in capsys.readouterr().out
    assert (workdir / "results.csv").read_bytes() == report
    assert snapshot(workdir) == before


@pytest.mark.parametrize("lines", [None, 0, 3])
def test_a_report_without_its_evaluations_is_an_error(tiny, finished_run, tmp_path, lines):
    workdir = tmp_path / "run"
    shutil.copytree(finished_run, workdir)
    path = workdir / "evaluations.jsonl"
    if lines is None:
        path.unlink()
    else:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    before = snapshot(workdir)
    with pytest.raises(WorkdirError, match=rf"evaluations\.jsonl lacks the row of step {12 if lines else 4}"):
        loop.run(tiny, workdir)
    assert snapshot(workdir) == before


@pytest.mark.parametrize("name", ["metrics.jsonl", "evaluations.jsonl"])
def test_rows_lost_before_the_checkpoint_are_an_error(tiny, finished_run, tmp_path, name):
    workdir = tmp_path / "run"
    shutil.copytree(finished_run, workdir)
    shutil.rmtree(workdir / "checkpoints" / "12")
    lines = (workdir / name).read_text().splitlines(keepends=True)
    (workdir / name).write_text("".join(lines[:1] + lines[2:]))
    before = snapshot(workdir)
    with pytest.raises(WorkdirError, match=rf"{name} lacks the row of step \d, .* when step 9 was saved"):
        loop.run(tiny, workdir)
    (workdir / name).write_text("".join(lines[:1]) + "garbage\n" + "".join(lines[1:]))
    with pytest.raises(WorkdirError, match=rf"{name}, line 2 is damaged: 'garbage'"):
        loop.run(tiny, workdir)
    (workdir / name).write_text("".join(lines[:1] + lines[2:]))
    assert snapshot(workdir) == before


@pytest.mark.parametrize("keeps_the_folder", [True, False])
def test_lost_checkpoints_are_an_error_that_drops_no_row(tiny, finished_run, tmp_path, keeps_the_folder):
    workdir = tmp_path / "run"
    shutil.copytree(finished_run, workdir)
    shutil.rmtree(workdir / "checkpoints")
    if keeps_the_folder:
        (workdir / "checkpoints").mkdir()
    before = snapshot(workdir)
    with pytest.raises(WorkdirError, match=r"checkpoints holds no checkpoint, but .* remove .*run or choose"):
        loop.run(tiny, workdir)
    assert snapshot(workdir) == before


def test_a_run_killed_before_its_first_checkpoint_starts_again(tiny, finished_run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(finished_run, workdir)
    for path in (workdir / "checkpoints").iterdir():
        shutil.rmtree(path)
    for name, step in (("metrics.jsonl", 6), ("evaluations.jsonl", 4)):
        lines = (workdir / name).read_text().splitlines(keepends=True)
        (workdir / name).write_text("".join(line for line in lines if json.loads(line)["step"] <= step))
    assert loop.run(tiny, workdir)
    assert exact(workdir) == exact(finished_run)


def test_a_second_run_in_the_same_workdir_is_refused_until_the_first_ends(tiny, finished_run, tmp_path):
    workdir = tmp_path / "run"
    shutil.copytree(finished_run, workdir)
    before = snapshot(workdir)
    with files.claimed(workdir, tiny, CountingTask.outputs):
        with pytest.raises(WorkdirError, match="run is in use by another run"):
            loop.run(tiny, workdir)
    assert snapshot(workdir) == before
    assert loop.run(tiny, workdir)


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_resumes(tiny, finished_run, tmp_path, monkeypatch, capsys):
    workdir = tmp_path / "run"
    record = loop._Run._record

    def record_and_terminate(run, step, *rest):
        record(run, step, *rest)
        if step == 7:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(loop._Run, "_record", record_and_terminate)
    handler = signal.getsignal(signal.SIGTERM)
    assert not loop.run(tiny, workdir)
    assert signal.getsignal(signal.SIGTERM) is handler
    assert checkpoint_steps(workdir)[-1] == 8
    assert "interrupted after step 8 of 12" in capsys.readouterr().out
    monkeypatch.undo()
    assert loop.run(tiny, workdir)
    assert exact(workdir) == exact(finished_run)


@pytest.mark.parametrize("what", ["loss", "gradient_norm"])
def test_a_non_finite_step_stops_the_run_and_is_never_saved(tiny, tmp_path, monkeypatch, what):
    original = CountingTask.loss

    def loss(self, params, model_state, batch, attention):
        value, aux = original(self, params, model_state, batch, attention)
        if batch[0].shape[1] == 8:  # the second stage
            zero = 0 * params["head"]["bias"][0]
            value += zero / zero if what == "loss" else jax.numpy.sqrt(zero)
        return value, aux

    monkeypatch.setattr(CountingTask, "loss", loss)
    tiny["ensemble"].update(normalizers=("l2",), seeds=(3,))
    workdir = tmp_path / "run"
    with pytest.raises(loop.NonFiniteError) as error:
        loop.run(tiny, workdir)
    assert f"{what} of l2/seed3 is nan at step 7. Last good checkpoint: step 6" in str(error.value)
    assert "learning_rate" in str(error.value)
    assert checkpoint_steps(workdir) == [3, 6]
    assert [row["step"] for row in read_rows(workdir / "metrics.jsonl")] == [1, 2, 4, 6]


def test_a_changed_config_touches_nothing(tiny, finished_run):
    before = snapshot(finished_run)
    tiny["optimizer"]["learning_rate"] = 1.0
    with pytest.raises(WorkdirError, match=r"optimizer\.learning_rate was 0\.003, now 1\.0"):
        loop.run(tiny, finished_run)
    tiny["experiment"] = "other"
    with pytest.raises(WorkdirError, match="holds the experiment 'tiny', not 'other'"):
        loop.run(tiny, finished_run)
    assert snapshot(finished_run) == before


@pytest.mark.parametrize(
    "name", ["results.csv", "metrics.jsonl", "checkpoints/5/x", "length_generalization.png"]
)
def test_files_of_others_are_not_overwritten(tiny, tmp_path, name):
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("precious")
    before = snapshot(tmp_path)
    with pytest.raises(WorkdirError, match=f"holds {name.split('/')[0]} but no config.json"):
        loop.run(tiny, tmp_path)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("text", ["not json", "[1]"])
def test_a_config_json_of_something_else_is_an_error(tiny, tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(WorkdirError, match="is not the config of an experiment"):
        loop.run(tiny, tmp_path)
    assert (tmp_path / "config.json").read_text() == text


def test_a_workdir_that_cannot_be_written_is_an_error(tiny, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkdirError, match=r"cannot write to --workdir=.*file/run: Not a directory"):
        loop.run(tiny, tmp_path / "file" / "run")


def test_learning_rate_of_the_rows_is_the_schedule(tiny, finished_run):
    config, task = loop.parse_config(tiny)
    for row in read_rows(finished_run / "metrics.jsonl"):
        stage = task.stages[row["stage"]]
        expected = optimizer.learning_rate(config.optimizer, stage, np.int32(row["step"] - 1))
        np.testing.assert_allclose(row["learning_rate"], expected, rtol=1e-6)
