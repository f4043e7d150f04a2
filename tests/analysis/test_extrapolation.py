"""Runs of language models in one table and figure: what is joined, what is shown, and what is refused."""

import csv
import dataclasses
import json

import pytest
from matplotlib.figure import Figure

from attnorm.analysis import extrapolation
from attnorm.analysis.__main__ import main
from attnorm.analysis.extrapolation import COLUMNS, RunError, read_runs, table

BUCKETS = (1, 2, 4, 8, 16)


def config(**changes):
    model = {"features": 16, "output_norm": "none", "output_norm_eps": 0.0, "position": "rope"}
    task = {"length": 4, "num_steps": 10, "corpus": "python_manual", "output_rescale": "none"}
    task["model"] = model | {key: changes.pop(key) for key in tuple(changes) if key in model}
    config = {"task": "lm", "ensemble": {"seeds": [0, 1, 2]}, "ema_decay": 0.0, "init_from": ""}
    config["optimizer"] = {"learning_rate": 1e-3, "weight_decay": 0.1}
    for section in (config["optimizer"], config):
        section |= {key: changes.pop(key) for key in tuple(changes) if key in section}
    return config | {"lm": task | changes}


def loss(normalizer, output_norm, seed, bucket):
    """A number for each, with a median of seeds that is not their mean."""
    return (
        (2 if normalizer == "l2" else 1)
        + (0.5 if output_norm != "none" else 0)
        + bucket / 100
        + seed**2 / 1000
    )


def write_run(folder, normalizers=("softmax", "l2"), step=10, **changes):
    folder.mkdir()
    made = config(**changes)
    output_norm = made["lm"]["model"]["output_norm"]
    (folder / "config.json").write_text(json.dumps(made))
    with open(folder / "results.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for at in {1, step}:  # only the last counts
            writer.writerows(
                {
                    "normalizer": name, "output_norm": output_norm, "output_rescale": "none",
                    "position": "rope", "rope_scaling": "none", "eval_rope_scaling": scaling,
                    "seed": seed, "trained_length": 4,
                    "step": at, "bucket": bucket, "unigram_entropy": 3.25,
                    "loss": loss(name, output_norm, seed, bucket) + (0.25 if scaling != "none" else 0)
                    + step - at,
                }
                for name in normalizers for scaling in ("none", "yarn(4)")
                for seed in range(3) for bucket in BUCKETS
            )  # fmt: skip
    logged = [
        {"step": at, **{f"loss/{name}/seed{seed}": at + seed for name in normalizers for seed in range(3)}}
        for at in (1, 10)
    ]  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in logged))
    return folder


@pytest.fixture
def runs(tmp_path):
    return write_run(tmp_path / "plain"), write_run(tmp_path / "avnorm", ("softmax",), output_norm="head_rms")


def test_runs_are_joined_by_variant_and_seed(runs):
    curves, training = read_runs(runs)
    assert (curves.trained_length, curves.step, curves.unigram_entropy) == (4, 10, 3.25)
    assert len(curves.losses) == 6 and curves.buckets == list(BUCKETS)
    avnorm = curves.losses["softmax", "head_rms", "none", "rope", "none", "yarn(4)"]
    assert avnorm[8] == {
        seed: pytest.approx(loss("softmax", "head_rms", seed, 8) + 0.25) for seed in range(3)
    }
    # Models that are evaluated twice were trained once.
    assert len(training) == 3 * 3 * 2
    assert [row["loss"] for row in training if row["normalizer"] == "l2" and row["seed"] == 2] == [3, 12]
    assert {row["output_norm"] for row in training} == {"none", "head_rms"}


def test_runs_may_have_learning_rates_of_their_own(runs, tmp_path):
    other = write_run(tmp_path / "other", ("softmax",), output_norm="head_layer", learning_rate=3e-3)
    assert len(read_runs([*runs, other])[0].losses) == 8


def test_table_names_what_differs_and_marks_the_trained_length(runs):
    lines = table(read_runs(runs)[0]).splitlines()
    assert lines[1].split() == ["b=2", "b=4", "b=8", "b=16"]
    assert len(lines) == 2 + 6
    row = next(line for line in lines if line.startswith("l2 "))
    assert row.split()[-4:] == ["2.021", "2.041*", "2.081", "2.161"]
    assert names(lines) == [
        "softmax", "softmax, evaluated with yarn(4)", "l2", "l2, evaluated with yarn(4)",
        "softmax, head_rms", "softmax, head_rms, evaluated with yarn(4)",
    ]  # fmt: skip


def names(lines):
    """The first column, as wide as the longest name."""
    return [line[: lines[1].index("b=") - 5].rstrip() for line in lines[2:]]


def test_names_tell_what_differs_and_is_there():
    named = {
        "softmax, position rope": ("softmax", "none", "none", "rope", "none", "none"),
        "softmax, position none": ("softmax", "none", "none", "none", "none", "none"),
        "softmax, position rope, trained with yarn(4)": ("softmax", "none", "none", "rope", *2 * ["yarn(4)"]),
        "softmax, sqrt_position, position rope, trained with yarn(4), evaluated with none": (
            "softmax", "none", "sqrt_position", "rope", "yarn(4)", "none",
        ),
    }  # fmt: skip
    curves = extrapolation.Curves(8, 1, 3.0, {variant: {8: {0: 1.0}} for variant in named.values()})
    assert names(table(curves).splitlines()) == list(named)
    (first, *_) = named.values()
    alone = dataclasses.replace(curves, losses={first: {8: {0: 1.0}}})
    assert names(table(alone).splitlines()) == ["softmax"]


def test_table_of_texts_that_are_shorter_than_the_rows_of_training(runs):
    curves = dataclasses.replace(read_runs(runs)[0], trained_length=64)
    lines = table(curves).splitlines()
    assert lines[1].split() == ["b=8", "b=16"]
    row = next(line for line in lines if line.startswith("l2 "))
    assert row.split()[-2:] == ["2.081", "2.161"]


def test_command_writes_tables_and_figures(runs, tmp_path, capsys, monkeypatch):
    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), savefig(self, *a, **k))
    )
    out = tmp_path / "new" / "out"
    assert main(["extrapolation", *map(str, runs), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "2.041*" in printed and str(out / "extrapolation.png") in printed
    assert sorted(path.name for path in out.iterdir()) == [
        "extrapolation.csv", "extrapolation.png", "training_loss.csv", "training_loss.png",
    ]  # fmt: skip
    with open(out / "extrapolation.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 * len(BUCKETS)
    (row,) = [
        r for r in rows
        if (r["normalizer"], r["eval_rope_scaling"], r["bucket"]) == ("l2", "yarn(4)", "16")
    ]  # fmt: skip
    numbers = [float(row[f"loss_{name}"]) for name in ("median", "min", "max")]
    assert numbers == pytest.approx([2.411, 2.41, 2.414]) and row["num_seeds"] == "3"
    by_position, training = figures
    curves = [line for line in by_position.axes[0].lines if not line.get_label().startswith("_")]
    assert len(curves) == 6 and list(curves[0].get_xdata()) == list(BUCKETS)
    assert by_position.axes[0].get_xscale() == "log"
    labels = [line.get_label() for line in training.axes[0].lines]
    assert labels == ["softmax", "l2", "softmax, head_rms"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": 32}, "config.lm.model.features is 16 and 32"),
        ({"weight_decay": 0.0}, "config.optimizer.weight_decay is 0.1 and 0.0"),
        ({"ema_decay": 0.9}, "config.ema_decay is 0.0 and 0.9"),
        ({"init_from": "runs/a"}, "config.init_from is '' and 'runs/a'"),
        ({"corpus": "bible"}, "config.lm.corpus is 'python_manual' and 'bible'"),
        ({"num_steps": 20}, "results.csv is of step 10 of 20"),
        ({}, "both have normalizer softmax, output_norm none"),
    ],
)
def test_runs_that_do_not_belong_together(runs, tmp_path, change, message):
    other = write_run(tmp_path / "other", **change)
    with pytest.raises(RunError, match=message) as caught:
        read_runs([runs[0], other])
    assert str(other) in str(caught.value)


def test_runs_that_cannot_be_read(runs, tmp_path, capsys):
    run, out = runs[0], tmp_path / "out"

    def error():
        assert main(["extrapolation", str(run), "--out", str(out)]) == 1
        assert not out.exists()
        return capsys.readouterr().err

    results = (run / "results.csv").read_text()
    (run / "results.csv").write_text(results[:-9])
    assert "results.csv" in error()
    (run / "results.csv").write_text(results.replace("bucket", "basket"))
    assert "is not the results.csv of a language model: no column bucket" in error()
    (run / "results.csv").unlink()
    assert f"{run} has not finished: it holds no results.csv" in error()
    (run / "config.json").write_text(json.dumps(config() | {"task": "counting"}))
    assert "must be a run of the task 'lm', got 'counting'" in error()
    (run / "config.json").write_text("{")
    assert "config.json is not the config of a run" in error()
    (run / "config.json").unlink()
    assert f"{run} is no workdir of train.py" in error()


def test_other_texts_are_not_compared(runs, tmp_path):
    other = write_run(tmp_path / "other", ("sink",))
    text = (other / "results.csv").read_text()
    (other / "results.csv").write_text(text.replace(",3.25\n", ",3.5\n"))
    with pytest.raises(RunError, match="the unigram entropy of the text is 3.25 and 3.5"):
        extrapolation.read_runs([runs[0], other])
