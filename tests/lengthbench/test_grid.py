"""Which cells run, and which do not again; the report of what they give. Training is replaced by given numbers."""

import csv
import dataclasses
import shlex
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import numpy as np
import pytest

from attnorm import get_normalizer
from attnorm.data.text_windows import text_fingerprint
from attnorm.lengthbench import cell as cell_module
from attnorm.lengthbench import grid as grid_module
from attnorm.lengthbench import workers
from attnorm.lengthbench.__main__ import main
from attnorm.lengthbench.diagnostics import DIAGNOSTICS
from attnorm.lengthbench.grid import GridError, finished, make_grid, run
from attnorm.lengthbench.report import write_report
from attnorm.lengthbench.suites import LEFT_OUT, SUITES
from attnorm.lengthbench.tasks import TASKS
from attnorm.normalizers import normalizer_names

TINY = SUITES["tiny"]


def weights(name, logits):
    return get_normalizer(name).weights(logits)


ARGUMENTS = ["--suite", "tiny", "--tasks", "mqar", "copy", "--normalizers", "softmax", "l2", "--jobs", "1"]


def fake_results(spec, contender):
    """Seed 1 of softmax does not pass the gate; l2 loses less with length."""
    kept = {"softmax": 0.5, "l2": 0.75}.get(contender.name, 0.6)
    rows, diagnostics = [], []
    for factor in TINY.factors:
        for variant in spec.variants:
            for seed in range(TINY.num_seeds):
                place = {"seed": seed, "factor": factor, "length": factor * spec.length, "variant": variant}
                place["sequences"] = 64
                value = 1.0 if factor == 1 else kept
                if contender.name == "softmax" and seed == 1:
                    value = 0.25
                error = 0.08 / value * (2 if getattr(spec, "norm", "layer") == "batch" else 1)
                rows.append({**place, "loss": 0.0, "accuracy": value, "exact": value, "error": error})
                diagnostics.append({**place, **dict.fromkeys(DIAGNOSTICS, kept * factor)})
    return {
        "sweep": [{"normalizer": contender.specs[0], "learning_rate": 1e-3, "loss": 0.5, spec.metric: 0.5}],
        "chosen": {"normalizer": contender.specs[0], "learning_rate": 1e-3},
        "rows": rows,
        "diagnostics": diagnostics,
        "learned": {},
    }


@pytest.fixture
def ran(monkeypatch):
    """The names of the cells that were run; the cell whose number is ``stops_at`` is interrupted, one fails."""
    calls = SimpleNamespace(names=[], stops_at=None, fails=None)

    def fake_run_cell(programs, suite, contender, progress):
        if len(calls.names) == calls.stops_at:
            raise KeyboardInterrupt
        if contender.name == calls.fails:
            raise FloatingPointError("no number")
        calls.names.append(contender.name)
        progress(1, "going well")
        return fake_results(programs.task.spec, contender)

    monkeypatch.setattr(workers, "run_cell", fake_run_cell)
    monkeypatch.setattr(workers, "Programs", lambda task, suite: SimpleNamespace(task=task))
    return calls


def run_and_read(grid):
    assert run(grid) == []
    return finished(grid)[1]


def test_an_interrupted_grid_goes_on_with_what_is_missing(ran, tmp_path, capsys):
    arguments = [*ARGUMENTS, "--out", str(tmp_path)]
    ran.stops_at = 3
    assert main(arguments) == 130
    assert ran.names == ["softmax", "l2", "softmax"]
    assert not (tmp_path / "report.md").exists()

    ran.names, ran.stops_at = [], None
    assert main(arguments) == 0
    assert ran.names == ["l2"]
    assert "4 cells, 3 of them complete" in capsys.readouterr().out

    ran.names = []
    assert main(arguments) == 0
    assert ran.names == []


def test_a_damaged_cell_is_reported_and_run_again(ran, tmp_path, capsys):
    arguments = [*ARGUMENTS, "--out", str(tmp_path)]
    assert main(arguments) == 0
    path = tmp_path / "cells" / "copy" / "l2.json"
    whole = path.read_text()
    path.write_text(whole.replace("0.75", "0.95"))
    ran.names = []
    capsys.readouterr()
    assert main(arguments) == 0
    assert ran.names == ["l2"]
    assert f"damaged, and run again: {path} does not fit its checksum" in capsys.readouterr().out
    assert "0.95" not in path.read_text() and "0.75" in path.read_text()


def test_a_cell_that_fails_is_named_and_the_others_go_on(ran, tmp_path, capsys):
    arguments = [*ARGUMENTS, "--out", str(tmp_path)]
    ran.fails = "softmax"
    assert main(arguments) == 1
    assert ran.names == ["l2", "l2"]
    error = capsys.readouterr().err
    assert "error: mqar, softmax: " in error and "error: copy, softmax: " in error and "no number" in error
    assert "| l2 |" in (tmp_path / "report.md").read_text()

    ran.fails, ran.names = None, []
    assert main(arguments) == 0
    assert ran.names == ["softmax", "softmax"]


def test_the_report_is_of_all_cells_of_the_folder_that_fit(ran, tmp_path, capsys):
    assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    other = tmp_path / "cells" / "copy" / "softmax.json"
    path = tmp_path / "cells" / "copy" / "softmaxx.json"
    path.write_text(other.read_text().replace('"softmax"', '"softmaxx"'))
    arguments = ["--suite", "tiny", "--tasks", "copy", "--normalizers", "sink", "--jobs", "1"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert f"not in the report: {path}" in capsys.readouterr().out
    with open(tmp_path / "results.csv", newline="") as file:
        pairs = {(row["task"], row["contender"]) for row in csv.DictReader(file)}
    grid = {(task, name) for task in ("mqar", "copy") for name in ("softmax", "l2")}
    assert pairs == {*grid, ("copy", "sink")}


def test_two_runs_cannot_have_one_folder(ran, tmp_path, capsys):
    grid = make_grid(TINY, tmp_path, "command", ["l2"], ["copy"])
    with grid.claimed():
        assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 1
    assert "in use by another run. Wait for its end, or choose another --out" in capsys.readouterr().err
    assert ran.names == []
    assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 0


def test_cells_of_other_settings_are_refused_before_anything_runs(ran, tmp_path, capsys):
    assert main([*ARGUMENTS, "--out", str(tmp_path)]) == 0
    ran.names = []
    assert main([*ARGUMENTS, "--seeds", "3", "--out", str(tmp_path)]) == 1
    assert "suite.num_seeds was 2, now 3" in capsys.readouterr().err
    assert ran.names == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tasks": ["copyy"]}, "tasks must be of .*got 'copyy'"),
        ({"contenders": ["softmaxx"]}, "normalizers: 'softmaxx'"),
        ({"contenders": ["l2", "l2"]}, "without repetition"),
        ({"contenders": ["lp(p=inf)@temperature"]}, "normalizers: 'lp\\(p=inf\\)@temperature': .*p"),
    ],
)
def test_what_is_unknown_is_named(change, message, tmp_path):
    with pytest.raises(GridError, match=message):
        make_grid(TINY, tmp_path, "command", **change)


def test_help_has_the_tasks_and_the_normalisers_of_every_suite(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "such as counting mqar" in shown
    for suite, text in zip(SUITES.values(), shown.split("suite ")[-len(SUITES) :], strict=True):
        assert text.startswith(f"{suite.name}, tasks and normalisers:")
        names = set(text.replace(",", " ").replace(": ", " ").split())
        assert names >= {name for cell in suite.cells(None, None) for name in cell}


def test_the_command_is_the_one_that_was_typed(ran, tmp_path, monkeypatch, capsys):
    """With its interpreter, as it stands in the message of a run that was stopped and in the report."""
    typed = ["env/bin/python", "-m", "attnorm.lengthbench", *ARGUMENTS, "--out", str(tmp_path / "a folder")]
    monkeypatch.setattr("sys.orig_argv", typed)
    monkeypatch.setattr("sys.argv", ["attnorm/lengthbench/__main__.py", *typed[3:]])
    ran.stops_at = 3
    assert main() == 130
    assert capsys.readouterr().err.endswith(f"with: {shlex.join(typed)}\n")
    ran.stops_at = None
    assert main() == 0
    assert shlex.join(typed) in (tmp_path / "a folder" / "report.md").read_text()


def test_a_folder_that_holds_something_else_is_refused(tmp_path):
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(GridError, match="out must be a new or empty folder"):
        make_grid(TINY, tmp_path, "command")


def test_every_suite_names_what_exists(tmp_path):
    for suite in SUITES.values():
        assert set(make_grid(suite, tmp_path, "command").specs) >= set(suite.tasks)


def test_full_has_every_normaliser_but_those_that_are_another(tmp_path):
    named = {name.partition("@")[0] for name in SUITES["full"].contenders}
    assert set(LEFT_OUT) < set(normalizer_names())
    assert set(normalizer_names()) - named == set(LEFT_OUT) - {"lp", "affine"}
    logits = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    for name, same in {"lp": "l2", "entmax": "entmax15"}.items():
        np.testing.assert_array_equal(weights(name, logits), weights(same, logits))
    for name in ("affine", "yarn", "llama4"):
        np.testing.assert_allclose(weights(name, logits), weights("softmax", logits), rtol=1e-6)


def test_the_report_has_command_commit_gate_and_pairs(ran, tmp_path):
    grid = make_grid(TINY, tmp_path / "out", "python -m attnorm.lengthbench", ["softmax", "l2"], ["copy"])
    cells = run_and_read(grid)
    cells[0]["made"]["commit"] = "0123abcd"
    paths = write_report(grid, cells)
    assert all(path.stat().st_size for path in paths)
    report = (tmp_path / "out" / "report.md").read_text()
    assert "python -m attnorm.lengthbench" in report and "0123abcd" in report
    assert "| softmax | 0.5 (0.5 to 0.5), 1/2 |" in report
    assert "| l2 | 0.75 (0.75 to 0.75) |" in report
    assert "| softmax | 0.625 (0.25 to 1), passed 1/2, rate 0.001 (edge) |" in report
    assert "with 2 seeds no single p is below 0.5" in report
    assert "sequences of each seed: 64 at ×1, 64 at ×4" in report
    assert "| l2 | +0.25 (n = 1, p = 1) | 1 better, 0 worse, p = 1 |" in report

    page = ElementTree.fromstring((tmp_path / "out" / "report.html").read_text())
    sources = [image.get("src") for image in page.iter("img")]
    assert sources and all(source.startswith("data:") for source in sources)
    assert not [e.tag for e in page.iter() if e.tag in ("script", "link", "iframe")]

    with open(tmp_path / "out" / "results.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(cells) * len(TINY.factors) * TINY.num_seeds
    failed = [row for row in rows if row["passed"] == "False"]
    assert {(row["contender"], row["seed"]) for row in failed} == {("softmax", "1")}
    assert {row["guess"] for row in rows if row["length"] == "4"} == {str(4.0**-4)}


def test_a_task_with_a_control_is_compared_with_the_one_without(ran, tmp_path):
    tasks = ["counting", "counting_batch_norm"]
    grid = make_grid(TINY, tmp_path / "out", "command", ["softmax", "l2"], tasks)
    write_report(grid, run_and_read(grid))
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| counting_batch_norm | l2 | -0.693 (n = 2, p = 0.5) | -0.693 (n = 2, p = 0.5) |" in report
    # At the training length the seed that does not pass the gate counts.
    assert "| counting_batch_norm | softmax | -0.693 (n = 2, p = 0.5) | -0.693 (n = 1, p = 1) |" in report


def test_a_task_has_one_vote_and_a_control_none(ran, tmp_path):
    tasks = ["counting", "counting_batch_norm"]
    grid = make_grid(TINY, tmp_path / "out", "command", ["softmax", "l2"], tasks)
    write_report(grid, run_and_read(grid))
    rows = [line for line in (tmp_path / "out" / "report.md").read_text().splitlines() if " better, " in line]
    against_softmax = [row for row in rows if row.startswith("| l2 |")]
    assert len(against_softmax) == 2
    assert all(row.endswith("| 1 better, 0 worse, p = 1 |") for row in against_softmax)


def test_equal_cells_give_equal_files(ran, tmp_path):
    cells, files = None, []
    for name in ("a", "b"):
        grid = make_grid(TINY, tmp_path / name, "command", ["softmax", "l2"], ["copy"])
        cells = cells or run_and_read(grid)
        files.append([path.read_bytes() for path in write_report(grid, cells)])
    assert files[0] == files[1]


def test_settings_tell_sizes_of_tasks_apart(ran, tmp_path, monkeypatch):
    grid = make_grid(TINY, tmp_path, "command", ["l2"], ["copy"])
    run(grid)
    changed = dataclasses.replace(grid.specs["copy"], num_steps=1)
    monkeypatch.setitem(grid_module.TASKS, "copy", lambda suite: changed)
    with pytest.raises(GridError, match="task.num_steps was 24, now 1"):
        run(make_grid(TINY, tmp_path, "command", ["l2"], ["copy"]))


def test_settings_have_arguments_of_the_task_the_optimizer_and_the_evaluation(monkeypatch):
    spec = TASKS["passkey"]("tiny")
    settings = cell_module.settings_of(TINY, spec)
    assert settings["task"]["draw"]["arguments"] == [[], {"num_digits": 2}]
    assert settings["task"]["variants"]["depth 0.5"] == {"depth": 0.5}
    assert settings["optimizer"]["weight_decay"] == 0.01
    monkeypatch.setattr(cell_module.evaluation, "MOST_SEQUENCES", 7)
    assert cell_module.settings_of(TINY, spec)["evaluation"]["most_sequences"] == 7


def test_settings_have_the_text_that_is_read():
    assert cell_module.settings_of(TINY, TASKS["text"]("tiny"))["task"]["text"] == text_fingerprint() != ""


def test_several_processes_on_one_accelerator_are_refused_before_anything_runs(ran, tmp_path, monkeypatch):
    monkeypatch.setattr(grid_module.jax, "devices", lambda: [SimpleNamespace(platform="tpu")])
    with pytest.raises(GridError, match="jobs must be 1 on tpu, which this process holds, got 2"):
        run(make_grid(TINY, tmp_path, "command", ["l2"], ["copy"]), 2)
    assert ran.names == []


def test_a_folder_that_cannot_be_written_is_refused_before_anything_runs(ran, tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main([*ARGUMENTS, "--out", str(tmp_path / "file" / "out")]) == 1
    assert "error: cannot read or write" in capsys.readouterr().err
    assert ran.names == []
