"""Accumulation, averages, host batches, kept checkpoints and first parameters, on a task that compiles at once."""

import importlib.util
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from attnorm.training import loop
from attnorm.training.checkpoint import Checkpointer
from attnorm.training.config import ConfigError
from attnorm.training.feed import eval_batch_rows
from attnorm.training.mesh import AXES
from attnorm.training.metrics import read_rows
from attnorm.training.setup import Setup
from attnorm.training.state import initial_ema, reset_optimizer
from attnorm.training.tasks import TASKS
from attnorm.training.throughput import PEAK_FLOPS, Pace

spec = importlib.util.spec_from_file_location("toy", Path(__file__).with_name("toy.py"))
toy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)


@pytest.fixture(autouse=True)
def toy_task(monkeypatch):
    monkeypatch.setitem(TASKS, "toy", toy.ToyTask)


@pytest.fixture(scope="module")
def toy_run(tmp_path_factory):
    """A finished run with averages and parts, and its config."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TASKS, "toy", toy.ToyTask)
        config = toy.config(ema_decay=0.5, accumulation_steps=2)
        workdir = tmp_path_factory.mktemp("toy") / "run"
        assert loop.run(config, workdir)
    return config, workdir


def state_of(config, workdir, step):
    like = Setup(*loop.parse_config(config)).abstract_state()
    return Checkpointer(workdir / "checkpoints", keep=10).restore(step, like=like)


def member(tree, index):
    return jax.tree.map(lambda x: np.asarray(x[index]), tree)


def batch_of(step, size=8):
    """Of update ``step``, 0 being the first."""
    task = toy.ToyTask(toy.ToyConfig(num_steps=1, batch_size=size, hidden=6))
    return task.host_batches(task.stages[0], 0, 1)[step]


def exact(workdir):
    rows = read_rows(workdir / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith("wall/")} for row in rows]


def test_parts_of_unequal_numbers_of_targets_give_the_gradient_of_the_whole():
    batch = batch_of(4)
    for parts in (2, 4):
        assert len({batch["mask"][part::parts].sum() for part in range(parts)}) > 1
    states = {}
    for parts in (1, 2, 4):
        setup = Setup(*loop.parse_config(toy.config(accumulation_steps=parts)))
        state = setup.init_state()
        before = member(state.params[0], 1)
        step = setup.train_step(setup.task.stages[0])
        state, metrics = step(state, batch)
        np.testing.assert_allclose(metrics["loss"][1], toy.mean_loss(before, batch), rtol=1e-5)
        states[parts] = jax.device_get((state.params, metrics))
    for parts in (2, 4):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-7), states[parts], states[1]
        )


def test_the_gradient_norm_is_that_of_the_mean():
    setup = Setup(*loop.parse_config(toy.config()))
    state = setup.init_state()
    params, batch = member(state.params[0], 0), batch_of(0)
    _, metrics = setup.train_step(setup.task.stages[0])(state, batch)
    square = 0.0
    for name in (("enter", "kernel"), ("enter", "bias"), ("leave", "kernel")):
        for index in np.ndindex(params[name[0]][name[1]].shape):
            sides = []
            for sign in (-1, 1):
                moved = jax.tree.map(lambda x: np.array(x, np.float64), params)
                moved[name[0]][name[1]][index] += sign * 1e-5
                sides.append(toy.mean_loss(moved, batch))
            square += ((sides[1] - sides[0]) / 2e-5) ** 2
    np.testing.assert_allclose(metrics["gradient_norm"][0], np.sqrt(square), rtol=1e-4)


def test_the_average_follows_the_parameters_and_is_what_is_evaluated(toy_run):
    config, workdir = toy_run
    states = {step: state_of(config, workdir, step) for step in (9, 10)}
    decay = min(0.5, (1 + 9) / (10 + 9))
    expected = jax.tree.map(
        lambda old, new: decay * np.asarray(old) + (1 - decay) * np.asarray(new),
        states[9].ema,
        states[10].params,
    )
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), states[10].ema, expected)
    (row,) = [row for row in read_rows(workdir / "evaluations.jsonl") if row["step"] == 10]
    halves = [jax.tree.map(lambda *x: np.stack(x), *half) for half in (toy.rows()[:24], toy.rows()[24:])]
    average, params = (member(tree[0], 1) for tree in (states[10].ema, states[10].params))
    found = row["error/l2/seed1"]
    np.testing.assert_allclose(found, np.mean([toy.mean_loss(average, half) for half in halves]), rtol=1e-5)
    assert abs(found - np.mean([toy.mean_loss(params, half) for half in halves])) > 1e-4


def test_memory_of_the_evaluation_counts_the_whole_state(toy_run):
    """Of which it reads the average alone; the rest stays on the devices beside it."""
    setup = Setup(*loop.parse_config(toy_run[0]))
    state = setup.abstract_state()
    compiled = setup.evaluate().lower(state).compile()
    whole = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().argument_size_in_bytes >= whole


def test_a_run_with_host_batches_goes_on_with_the_next_batch(toy_run, tmp_path):
    config, whole = toy_run
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    for step in (6, 9, 10):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    assert loop.run(config, workdir)
    assert exact(workdir) == exact(whole)
    states = (jax.device_get(state_of(config, path, 10)) for path in (workdir, whole))
    jax.tree.map(np.testing.assert_array_equal, *states)
    for row in read_rows(workdir / "metrics.jsonl"):
        assert row["wall/tokens_per_second"] > 0 and row["wall/data_seconds_per_step"] >= 0


def test_the_rows_are_losses_of_the_batches_in_order(toy_run):
    config, workdir = toy_run
    rows = read_rows(workdir / "metrics.jsonl")
    for step in (3, 6):  # the parameters after so many updates are the next one's
        params = member(state_of(config, workdir, step).params[0], 0)
        expected = toy.mean_loss(params, batch_of(step))
        np.testing.assert_allclose(rows[step]["loss/l2/seed0"], expected, rtol=1e-5)


def test_kept_are_the_newest_and_every_period(tmp_path):
    config = toy.config(checkpoint_every=1, keep_checkpoints=1, keep_period=4)
    assert loop.run(config, tmp_path / "run")
    kept = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [4, 8, 10]


def test_first_parameters_from_another_run(toy_run, tmp_path):
    config, source = toy_run
    other = toy.config(init_from=str(source), ema_decay=0.9)
    other["ensemble"]["normalizers"] = ("softmax",)
    other["toy"] = {"num_steps": 1, "batch_size": 16, "hidden": 6}
    assert loop.run(other, tmp_path / "run")
    final = member(state_of(config, source, 10).params[0], 1)
    (row,) = read_rows(tmp_path / "run" / "metrics.jsonl")
    expected = toy.mean_loss(final, batch_of(0, size=16))
    np.testing.assert_allclose(row["loss/softmax/seed1"], expected, rtol=1e-5)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "1")  # as if killed before it was there
    assert loop.run(other, tmp_path / "run")
    assert exact(tmp_path / "run")[0]["loss/softmax/seed1"] == row["loss/softmax/seed1"]


def test_an_average_starts_at_the_parameters_as_arrays_of_its_own():
    params = ({"w": jnp.ones(3)},)
    config, _ = loop.parse_config(toy.config(ema_decay=0.9))
    average = initial_ema(params, config)
    np.testing.assert_array_equal(average[0]["w"], 1)
    assert average[0]["w"].unsafe_buffer_pointer() != params[0]["w"].unsafe_buffer_pointer()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"init_from": "/nowhere"}, "config.init_from must be the workdir of a run, got '/nowhere'"),
        ({"accumulation_steps": 3}, "config.accumulation_steps must divide the 8 rows of a batch"),
        (
            {"mesh": {"data": 2, "fsdp": 1, "context": 1, "tensor": 3}},
            "config.mesh must make up the 1 devices, got data=2 x fsdp=1 x context=1 x tensor=3",
        ),
    ],
)
def test_bad_input_writes_nothing(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        loop.run(toy.config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_models_of_another_shape_are_named(toy_run, tmp_path):
    _, source = toy_run
    changes = {"init_from": str(source), "toy": {"num_steps": 1, "batch_size": 8, "hidden": 7}}
    message = "params/0/enter/bias has shape (2, 6) there and (2, 7) here"
    with pytest.raises(ConfigError, match=re.escape(message)):
        loop.run(toy.config(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_may_go_on_with_another_mesh_alone(toy_run, tmp_path, capsys):
    config, whole = toy_run
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    for step in (9, 10):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    with pytest.raises(loop.files.WorkdirError, match=r"accumulation_steps was 2, now 1"):
        loop.run({**config, "accumulation_steps": 1}, workdir)
    assert loop.run({**config, "mesh": {"data": 1, "fsdp": -1, "context": 1, "tensor": 1}}, workdir)
    assert "resuming after step 6" in capsys.readouterr().out
    assert exact(workdir) == exact(whole)


def test_an_evaluation_that_fails_does_so_before_the_first_step(tmp_path, monkeypatch):
    def evaluate(self, params, model_state, batch, attention):
        raise NotImplementedError("no such evaluation")

    monkeypatch.setattr(toy.ToyTask, "evaluate", evaluate)
    with pytest.raises(NotImplementedError, match="no such evaluation"):
        loop.run(toy.config(), tmp_path / "run")
    assert read_rows(tmp_path / "run" / "metrics.jsonl") == []


def test_batches_that_the_devices_do_not_share_are_said_to_be_on_each(toy_run, monkeypatch):
    setup = Setup(*loop.parse_config(toy_run[0]))
    assert eval_batch_rows(setup.task) == [24]
    monkeypatch.setattr(setup, "mesh", AbstractMesh((16, 1, 1, 1), AXES))
    run = loop._Run(setup, "", None, None, None)
    assert "the 24 rows of an evaluation batch are no multiple" in run._undivided(24, "an evaluation batch")
    assert run._undivided(32, "an evaluation batch") == ""


def test_processes_with_other_data_than_the_first_are_named(monkeypatch):
    loop._require_same_data("crc32 1")
    monkeypatch.setattr(
        loop.multihost_utils, "process_allgather", lambda own: np.array([own, own + 1, own, own + 2])
    )
    with pytest.raises(ConfigError, match="the data of process 1, 3 differ from those of process 0"):
        loop._require_same_data("crc32 1")


def test_a_fresh_optimizer_is_compiled_once(toy_run):
    setup = Setup(*loop.parse_config(toy_run[0]))
    state, traced = setup.init_state(), []
    counted = setup.optimizer._replace(init=lambda params: traced.append(1) or setup.optimizer.init(params))
    fresh = reset_optimizer(state, counted)
    again = reset_optimizer(fresh, counted)
    assert len(traced) == 1
    jax.tree.map(np.testing.assert_array_equal, again.optimizer_state, state.optimizer_state)


def test_a_trace_of_steps_that_the_run_has_not_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="profile_steps must be among the run's 10 steps, got 9-11"):
        loop.run(toy.config(), tmp_path / "run", profile_steps=(9, 11))
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_trace_of_some_steps(tmp_path):
    assert loop.run(toy.config(), tmp_path / "run", profile_steps=(3, 4))
    assert list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))


def test_tokens_per_second_and_mfu_are_of_the_same_time(monkeypatch):
    monkeypatch.setitem(PEAK_FLOPS, jax.devices()[0].device_kind, 2e12)
    pace = Pace(step=3)
    with pace.waiting():
        pass
    measured = pace.measure(5, tokens_per_step=100, flops_per_step=1e9)
    steps_per_second = measured["wall/tokens_per_second"] / 100
    assert measured["wall/mfu"] == pytest.approx(steps_per_second * 1e9 / (2e12 * jax.device_count()))
    assert 0 <= measured["wall/data_seconds_per_step"] <= 1 / steps_per_second
