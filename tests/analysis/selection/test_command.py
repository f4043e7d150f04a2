"""The command: what it writes, how it goes on after an interruption, and what it refuses."""

import csv
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
from matplotlib.figure import Figure

from attnorm.analysis import sources
from attnorm.analysis.__main__ import main
from attnorm.analysis.selection import command
from tests.analysis.selection.heads import Given

SMALL = (
    "--lengths 12 --num-selected 1 4 --num-selected-by-length 2 --max-rows 4 --max-gradient-rows 1".split()
)
SMALL += "--temperatures 0.02 0.05 1 --steps 0.001 --normalizer l2".split()
FILES = [f"figure_{name}.{suffix}" for name in ("2a", "2b", "2c", "3", "4") for suffix in ("csv", "png")]
FILES += ["heads.csv", "settings.json", "summary.csv", "summary.md"]


def run(out, *arguments):
    return main(["selection", "--model", "synthetic", "--out", str(out), *SMALL, *arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A folder that the command has finished."""
    folder = tmp_path_factory.mktemp("selection") / "out"
    assert run(folder) == 0
    return folder


@pytest.fixture
def measured(finished, monkeypatch):
    """The command with the finished folder's tables in place of measurements; the names it was asked for."""
    asked = []

    def canned(name):
        def measurement(study):
            asked.append(name)
            return [
                row | {"normalizer": rule}
                for rule in study.normalizers
                for row in command._read(finished, name)
            ]

        return measurement

    for name, (_, passes) in command._MEASUREMENTS.items():
        monkeypatch.setitem(command._MEASUREMENTS, name, (canned(name), passes))
    return asked


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".png"}


def test_every_figure_has_a_table_and_an_image(finished):
    assert names(finished) == FILES
    for name in FILES:
        content = (finished / name).read_bytes()
        assert len(content) > 100
        assert not name.endswith(".png") or (content.startswith(b"\x89PNG\r\n") and len(content) > 20_000)
    with open(finished / "figure_2b.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * 4  # N, heads
    assert {row["normalizer"] for row in table} == {"l2 (re-normalised)"}
    for row in table:
        assert 0 < float(row["distance"]) <= float(row["bound"]) * 1.002
        assert float(row["expected_low"]) <= float(row["expected_high"]) * 1.002


def test_without_a_model_the_synthetic_one_is_measured(measured, finished, tmp_path):
    assert main(["selection", "--out", str(tmp_path), *SMALL]) == 0
    assert contents(tmp_path) == contents(finished)


def test_summary_has_the_claims_of_both_sides(finished):
    with open(finished / "summary.csv", newline="") as file:
        summary = list(csv.DictReader(file))
    assert {row["from"] for row in summary} == {"paper's form, beyond its scope", "ours"}
    assert {row["figure"] for row in summary} == {"2a", "2b", "2c", "3", "4"}
    # Bounds that are proved cannot fail, and the paper's spectral bound does where two keys are close.
    verdicts = {row["claim"]: row["verdict"] for row in summary}
    for claim, verdict in verdicts.items():
        assert "as proved: d̃" not in claim or verdict == "holds"
        assert "C_p/T" not in claim or verdict == "holds"
    assert verdicts["Corollary 3: ‖J‖₂ <= min(1/(4T), sqrt 2)"] == "does not hold"
    text = (finished / "summary.md").read_text()
    assert (
        text.startswith("synthetic (causal), examples, L = 12\n") and text.count("\n| ") == len(summary) + 1
    )


def test_an_interrupted_command_goes_on_at_the_unfinished_figure(
    finished, measured, tmp_path, monkeypatch, capsys
):
    complete = command._MEASUREMENTS["3"]

    def interrupted(study):
        raise KeyboardInterrupt

    monkeypatch.setitem(command._MEASUREMENTS, "3", (interrupted, complete[1]))
    assert run(tmp_path) == 1
    assert "stopped; the same command goes on from here" in capsys.readouterr().err
    assert names(tmp_path) == [*FILES[:6], "settings.json"]
    (tmp_path / "figure_2c.png").unlink()  # as if stopped between the table and the image
    monkeypatch.setitem(command._MEASUREMENTS, "3", complete)
    del measured[:]
    assert run(tmp_path) == 0
    assert measured == ["3", "4", "heads"]
    assert contents(tmp_path) == contents(finished)
    assert names(tmp_path) == FILES
    del measured[:]
    assert run(tmp_path) == 0
    assert measured == [] and contents(tmp_path) == contents(finished)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--level", "0.05"], "level 0.01, not 0.05"),
        (["--lengths", "8", "16"], "lengths [12], not [8, 16]"),
        (["--normalizer", "softmax", "l2"], "normalizers ['l2'], not ['softmax', 'l2']"),
        (["--text", "TEXT"], "text 'examples', not 'text.txt'"),
    ],
)
def test_other_settings_in_the_same_folder_are_named(
    finished, measured, tmp_path, capsys, arguments, message
):
    text = tmp_path / "text.txt"
    text.write_text("other words, " * 10)
    before = contents(finished)
    assert run(finished, *(argument.replace("TEXT", str(text)) for argument in arguments)) == 1
    error = capsys.readouterr().err
    assert "holds results of other settings" in error and message in error
    assert contents(finished) == before and measured == []


def test_results_without_settings_are_left_alone(measured, tmp_path, capsys):
    (tmp_path / "figure_3.csv").write_text("mine")
    assert run(tmp_path) == 1
    assert "holds figure_3.csv but no settings.json" in capsys.readouterr().err
    assert names(tmp_path) == ["figure_3.csv"]
    (tmp_path / "figure_3.csv").unlink()
    (tmp_path / "settings.json").write_text("{")
    assert run(tmp_path) == 1
    assert "settings.json is damaged" in capsys.readouterr().err
    assert names(tmp_path) == ["settings.json"]
    (tmp_path / "settings.json").write_text("[1]")
    assert run(tmp_path) == 1
    assert "settings.json is damaged" in capsys.readouterr().err
    (tmp_path / "settings.json").unlink()
    for name in ("summary.md", "figure_4.png"):
        (tmp_path / name).write_text("mine")
        assert run(tmp_path) == 1
        assert f"holds {name} but no settings.json" in capsys.readouterr().err
        assert names(tmp_path) == [name] and (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: text.index("\n") + 1],
        lambda text: text[: len(text) // 2],
        lambda text: text.replace(",", ";"),
        lambda text: text.replace("1.", "1,"),
        lambda text: text.replace("1.", "x."),
        lambda text: text + text.splitlines()[-1].replace("l2 (re-normalised)", "l3") + "\n",
        lambda text: "\xff",
    ],
)
def test_tables_that_were_damaged_are_named(finished, tmp_path, capsys, damage):
    folder = shutil.copytree(finished, tmp_path / "out")
    table = folder / "figure_2b.csv"
    table.write_text(damage(table.read_text()), encoding="latin-1")
    before = contents(folder)
    assert run(folder) == 1
    error = capsys.readouterr().err
    assert f"{table} is damaged: delete it, and the same command measures it again" in error
    assert contents(folder) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "SHORT"], "text must have at least 1 x 12 = 12 tokens, got one of 5"),
        (["--text", "MISSING"], "cannot be read"),
        (["--num-selected", "12"], "num_selected must be below the largest length, L = 12, got 12"),
        (["--lengths", "9000"], "lengths must be at most 8192, what synthetic can read, got 9000"),
        (["--temperatures", "0"], "temperatures must be positive and finite, got 0.0"),
        (["--temperatures", "-1"], "temperatures must be positive and finite, got -1.0"),
        (["--normalizer", "l3"], "normalizer must be one of"),
        (["--normalizer", "lp(p=0)"], "p must be"),
        (["--model", "no-such-model/at all"], "no-such-model/at all"),
    ],
)
def test_bad_input_is_named_before_anything_is_written(measured, tmp_path, capsys, arguments, message):
    (tmp_path / "short.txt").write_text("short")
    paths = {"SHORT": tmp_path / "short.txt", "MISSING": tmp_path / "missing.txt"}
    assert run(tmp_path / "out", *(str(paths.get(argument, argument)) for argument in arguments)) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert not (tmp_path / "out").exists() and measured == []


def test_logits_that_are_not_finite_are_named(tmp_path, capsys, monkeypatch):
    logits = np.zeros((1, 12, 12))
    logits[0, 3, 4] = np.nan
    monkeypatch.setattr(sources, "load", lambda model: Given(logits, np.ones((12, 1))))
    assert run(tmp_path) == 1
    assert "logits of only of given are not finite" in capsys.readouterr().err
    assert names(tmp_path) == ["settings.json"]
    assert json.loads((tmp_path / "settings.json").read_text())["model"] == "synthetic"


def test_models_of_another_kind_are_told_apart(measured, tmp_path, monkeypatch):
    """A bidirectional model's numbers say so, and the model's own normaliser is not called re-normalised."""
    source = Given(np.zeros((1, 12, 12)), np.ones((12, 1)))
    source.normalizer = command.parse_rules(["l2"])["l2"]
    monkeypatch.setattr(command, "draw", lambda *_: Figure())
    monkeypatch.setattr(sources, "load", lambda model: source)
    assert run(tmp_path, "--normalizer", "l2", "softmax") == 0
    text = (tmp_path / "summary.md").read_text()
    assert "given (bidirectional, not comparable with causal models)" in text
    assert "| softmax (re-normalised) |" in text and "| l2 |" in text


@pytest.mark.slow
def test_several_texts_lengths_and_normalizers(tmp_path):
    """Every normaliser is measured on every text; what is proved holds for each."""
    arguments = ["--lengths", "12", "24", "--num-texts", "2"]
    arguments += ["--normalizer", "lp(p=3)", "sink(b=1)"]
    assert run(tmp_path, *arguments) == 0
    with open(tmp_path / "summary.csv", newline="") as file:
        summary = list(csv.DictReader(file))
    assert len({row["normalizer"] for row in summary}) == 2
    judged = [
        row
        for row in summary
        if row["from"] == "ours" and ("as proved: d̃" in row["claim"] or "C_p" in row["claim"])
    ]
    assert len(judged) == 2 * 3
    for row in judged:
        unknown = "C_p" in row["claim"] and "sink" in row["normalizer"]
        assert row["verdict"] == ("not judged" if unknown else "holds"), row


@pytest.mark.slow
def test_memory_of_a_layer_at_full_length():
    """Twelve heads at L = 1024, with each head's values as vectors, stay far below 4 GB."""
    program = """
import resource, numpy as np
from attnorm import get_normalizer
from attnorm.analysis.selection import measure
from attnorm.analysis.selection.options import Options
from tests.analysis.selection.heads import Given
rng = np.random.default_rng(0)
source = Given(rng.normal(size=(12, 1024, 1024)), rng.normal(size=(1024, 64)), is_causal=True)
options = Options(
    lengths=(1024,), vectors="values", max_rows=64, num_selected=(1, 100), max_gradient_rows=1, temperatures=(1.0,)
)
study = measure.Study(source, source.example_tokens(1024, 1), {"l2": get_normalizer("l2")}, options)
for measurement in (measure.distance_by_num_selected, measure.separability, measure.gradients, measure.heads):
    assert measurement(study)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(result.stdout) < 3
