"""The loss of language models by position, within and beyond the trained length, of several runs."""

import csv
import dataclasses
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from attnorm.analysis.files import csv_bytes, png_bytes, write_atomically

RESULTS = "results.csv"
# What makes one model another, beside the seed; then what was measured. Bucket b is the positions [b/2, b).
VARIANT = ("normalizer", "output_norm", "output_rescale", "position", "rope_scaling", "eval_rope_scaling")
COLUMNS = (*VARIANT, "seed", "trained_length", "step", "bucket", "loss", "unigram_entropy")

_CONFIG, _METRICS = "config.json", "metrics.jsonl"
# The keys of the config that say in which variant a run's models are; all others of the task must agree.
_VARIANT_KEYS = {
    "output_rescale",
    "eval_yarn_factors",
    "learned_normalizer",
    "model.output_norm",
    "model.output_norm_eps",
    "model.position",
    "model.rope_scaling",
    "model.rope_factor",
    "model.rope_original_length",
}
# Okabe and Ito's palette: distinct also without red-green vision.
_COLORS = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("-", "--", "-.", ":")

Variant = tuple[str, ...]  # by VARIANT
BySeed = Mapping[int, float]


class RunError(ValueError):
    """Runs that have not finished, are no language models, or do not belong into one figure."""


@dataclasses.dataclass(frozen=True)
class Curves:
    """Losses after the last step, by variant, bucket and seed."""

    trained_length: int
    step: int
    unigram_entropy: float
    losses: Mapping[Variant, Mapping[int, BySeed]]

    @property
    def buckets(self) -> list[int]:
        return sorted({bucket for by_bucket in self.losses.values() for bucket in by_bucket})


def read_results(path: Path) -> Curves:
    """The curves of one results.csv.

    Raises:
      RunError: a column or a row is missing, or a line is cut off or holds something else than belongs there.
    """
    text = path.read_text(encoding="utf-8")
    reader = csv.DictReader(text.splitlines())
    if missing := set(COLUMNS) - set(reader.fieldnames or ()):
        raise RunError(f"{path} is not the {RESULTS} of a language model: no column {min(missing)}")
    rows: list[dict[str, Any]] = []
    for row in reader:
        try:
            numbers: dict[str, float] = {
                name: int(row[name]) for name in ("seed", "trained_length", "step", "bucket")
            }
            numbers |= {name: float(row[name]) for name in ("loss", "unigram_entropy")}
        except (TypeError, ValueError) as error:
            raise RunError(f"{path}, line {reader.line_num}: {error}") from None
        rows.append(row | numbers)
    if not rows or not text.endswith("\n"):
        raise RunError(f"{path} is cut off after line {reader.line_num}")
    last = max(row["step"] for row in rows)
    losses: dict[Variant, dict[int, dict[int, float]]] = {}
    for row in rows:
        if row["step"] == last:
            variant = tuple(row[name] for name in VARIANT)
            losses.setdefault(variant, {}).setdefault(row["bucket"], {})[row["seed"]] = row["loss"]
    return Curves(rows[0]["trained_length"], last, rows[0]["unigram_entropy"], losses)


def read_runs(workdirs: Sequence[Path]) -> tuple[Curves, list[dict[str, Any]]]:
    """The curves of several finished runs together, and the losses in training as rows of a table.

    Raises:
      RunError: a run that is unfinished or of another task, runs that differ in more than their variant, or a
        variant and seed that two of them have.
    """
    runs = {workdir: _read_run(workdir) for workdir in workdirs}
    _require_comparable(runs)
    training: list[dict[str, Any]] = []
    losses: dict[Variant, dict[int, dict[int, float]]] = {}
    seen: dict[tuple[Variant, int], Path] = {}
    for workdir, (_, curves) in runs.items():
        for variant, by_bucket in curves.losses.items():
            for bucket, by_seed in by_bucket.items():
                for seed, loss in by_seed.items():
                    other = seen.setdefault((variant, seed), workdir)
                    if other != workdir:
                        raise RunError(f"{other} and {workdir} both have {_words(variant)}, seed {seed}")
                    losses.setdefault(variant, {}).setdefault(bucket, {})[seed] = loss
        training += _training_rows(workdir, curves)
    return dataclasses.replace(curves, losses=losses), training


def table(curves: Curves) -> str:
    """The median over seeds at each bucket from half the trained length on; ``*`` marks that length.

    Where only shorter texts were evaluated, the last two buckets.
    """
    shortest = min(curves.trained_length, curves.buckets[-1])
    buckets = [bucket for bucket in curves.buckets if 2 * bucket >= shortest]
    names = _names(curves.losses)
    width = max(map(len, names.values()))
    lines = ["loss at positions [b/2, b), median over seeds (* b = trained length)"]
    lines.append(f"{'':{width}} " + " ".join(f"{f'b={bucket}':>8} " for bucket in buckets))
    for variant, by_bucket in curves.losses.items():
        cells = (
            f"{statistics.median(by_bucket[b].values()):>8.3f}{'*' if b == curves.trained_length else ' '}"
            for b in buckets
        )
        lines.append(f"{names[variant]:{width}} " + " ".join(cells))
    return "\n".join(line.rstrip() for line in lines)


def draw(curves: Curves, path: Path) -> None:
    """Draws the loss against position, a line for each variant, and replaces the image as a whole."""
    with _style():
        figure, axes = _axes(curves.losses)
        for name, points, style in _lines(curves.losses):
            _draw_spread(axes, points, name, style)
        axes.axhline(curves.unigram_entropy, color="0.35", linewidth=1, linestyle="--")
        axes.annotate(
            "unigram entropy", (0.01, curves.unigram_entropy), xycoords=("axes fraction", "data"),
            xytext=(0, 3), textcoords="offset points", color="0.35", fontsize=9,
        )  # fmt: skip
        axes.axvline(curves.trained_length, color="0.6", linewidth=1, linestyle=":", zorder=0)
        axes.annotate(
            "trained length", (curves.trained_length, 0.03), xycoords=("data", "axes fraction"),
            xytext=(-4, 0), textcoords="offset points", rotation=90, ha="right", va="bottom",
            color="0.35", fontsize=9,
        )  # fmt: skip
        axes.set_xscale("log", base=2)
        ticks = curves.buckets[:: math.ceil(len(curves.buckets) / 8)]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel("position b (mean over [b/2, b))")
        axes.set_ylabel("loss (nats per token)")
        axes.set_title("Held-out loss by position (median, min-max over seeds)", fontsize=12)
        _finish(axes)
        write_atomically(path, png_bytes(figure))


def write(workdirs: Sequence[Path], out: Path) -> tuple[list[Path], str]:
    """Writes tables and figures of the runs into a folder, made if missing; returns files and a table.

    Raises:
      RunError: as :func:`read_runs`; nothing is written then.
    """
    curves, training = read_runs(workdirs)
    out.mkdir(parents=True, exist_ok=True)
    files = [
        out / name
        for name in ("extrapolation.csv", "extrapolation.png", "training_loss.csv", "training_loss.png")
    ]
    write_atomically(files[0], csv_bytes(_summary_rows(curves)))
    draw(curves, files[1])
    write_atomically(files[2], csv_bytes(training))
    _draw_training(training, files[3])
    return files, table(curves)


def _read_run(workdir: Path) -> tuple[Mapping[str, Any], Curves]:
    """What must be the same in all runs of a figure, and the curves of this one."""
    try:
        config = json.loads((workdir / _CONFIG).read_text(encoding="utf-8"))
        task = config["task"]
        compared, num_steps = (_compared(config), config["lm"]["num_steps"]) if task == "lm" else ({}, None)
    except FileNotFoundError:
        raise RunError(f"{workdir} is no workdir of train.py: it holds no {_CONFIG}") from None
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise RunError(f"{workdir / _CONFIG} is not the config of a run: {error!r}") from error
    if task != "lm":
        raise RunError(f"{workdir} must be a run of the task 'lm', got {task!r}")
    if not (workdir / RESULTS).is_file():
        raise RunError(f"{workdir} has not finished: it holds no {RESULTS}")
    curves = read_results(workdir / RESULTS)
    if curves.step != num_steps:
        raise RunError(f"{workdir} has not finished: {RESULTS} is of step {curves.step} of {num_steps}")
    return compared | {"the unigram entropy of the text": curves.unigram_entropy}, curves


def _require_comparable(runs: Mapping[Path, tuple[Mapping[str, Any], Curves]]) -> None:
    (first, (wanted, _)), *others = runs.items()
    for workdir, (found, _) in others:
        for key in sorted(wanted.keys() | found.keys()):
            if wanted.get(key) != found.get(key):
                raise RunError(
                    f"{first} and {workdir} do not belong into one figure: "
                    f"{key} is {wanted.get(key)!r} and {found.get(key)!r}"
                )


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    """What must be the same in all runs."""
    task = dict(config["lm"])
    model = task.pop("model")
    flat = task | {f"model.{key}": value for key, value in model.items()}
    kept = {f"config.lm.{key}": value for key, value in flat.items() if key not in _VARIANT_KEYS}
    kept |= {f"config.{key}": config[key] for key in ("ema_decay", "init_from")}
    # The best learning rate is another one for every variant.
    training = {key: value for key, value in config["optimizer"].items() if key != "learning_rate"}
    kept |= {f"config.optimizer.{key}": value for key, value in training.items()}
    return kept | {"config.ensemble.seeds": config["ensemble"]["seeds"]}


def _training_rows(workdir: Path, curves: Curves) -> list[dict[str, Any]]:
    """The losses in metrics.jsonl, one row for each variant, seed and logged step."""
    lines = (workdir / _METRICS).read_text(encoding="utf-8").splitlines()
    try:
        logged = [json.loads(line) for line in lines]
        return [
            # Models that are only evaluated in several ways were trained once.
            dict(zip(VARIANT[:-1], variant[:-1], strict=True))
            | {"seed": seed, "step": row["step"], "loss": row[f"loss/{_spec(variant)}/seed{seed}"]}
            for variant in {variant[:-1]: variant for variant in curves.losses}.values()
            for seed in next(iter(curves.losses[variant].values()))
            for row in logged
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{workdir / _METRICS} is not of this run: {error!r}") from error


def _spec(variant: Variant) -> str:
    return variant[0].removeprefix("learned ")


def _summary_rows(curves: Curves) -> list[dict[str, Any]]:
    return [
        dict(zip(VARIANT, variant, strict=True))
        | {
            "bucket": bucket,
            "num_seeds": len(by_seed),
            "loss_median": statistics.median(by_seed.values()),
            "loss_min": min(by_seed.values()),
            "loss_max": max(by_seed.values()),
        }
        for variant, by_bucket in curves.losses.items()
        for bucket, by_seed in sorted(by_bucket.items())
    ]


def _style() -> AbstractContextManager[None]:
    return matplotlib.rc_context(
        {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 160}
    )


def _draw_training(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    losses: dict[Variant, dict[int, dict[int, float]]] = {}
    for row in rows:
        variant = tuple(row[name] for name in VARIANT[:-1])
        losses.setdefault(variant, {}).setdefault(row["step"], {})[row["seed"]] = row["loss"]
    with _style():
        figure, axes = _axes(losses)
        for name, points, style in _lines(losses):
            _draw_spread(axes, points, name, style)
        axes.set_xlabel("updates")
        axes.set_ylabel("loss (nats per token)")
        axes.set_title("Loss in training (median, min-max over seeds)", fontsize=12)
        _finish(axes)
        write_atomically(path, png_bytes(figure))


def _axes(losses):
    """Those of a figure with room for two columns of names below."""
    figure = Figure(figsize=(6.8, 4.2 + 0.1 * len(losses)), layout="constrained")
    return figure, figure.subplots()


def _lines(losses):
    for index, (variant, name) in enumerate(_names(losses).items()):
        style = {
            "color": _COLORS[index % len(_COLORS)],
            "linestyle": _DASHES[index // len(_COLORS) % len(_DASHES)],
        }
        yield name, losses[variant], style


def _draw_spread(axes, points: Mapping[int, BySeed], name: str, style: Mapping[str, str]) -> None:
    places = sorted(points)
    values = [points[place].values() for place in places]
    axes.plot(places, [statistics.median(v) for v in values], label=name, **style)
    lowest, highest = [min(v) for v in values], [max(v) for v in values]
    axes.fill_between(places, lowest, highest, color=style["color"], alpha=0.13, linewidth=0)


def _finish(axes) -> None:
    axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)


def _names(variants: Mapping[Variant, Any]) -> Mapping[Variant, str]:
    """The normaliser, and what else differs and is there."""
    differing = [len(set(values)) > 1 for values in zip(*variants, strict=True)]
    return {
        variant: ", ".join(
            _word(name, value)
            for name, value, differs in zip(VARIANT, variant, differing, strict=False)
            if name == "normalizer" or (differs and _is_told(name, value, variant))
        )
        for variant in variants
    }


def _is_told(name: str, value: str, variant: Variant) -> bool:
    if name == "eval_rope_scaling":
        return value != variant[VARIANT.index("rope_scaling")]
    return name == "position" or value != "none"


def _words(variant: Variant) -> str:
    return ", ".join(f"{name} {value}" for name, value in zip(VARIANT, variant, strict=True))


def _word(name: str, value: str) -> str:
    prefix = {
        "position": "position ",
        "rope_scaling": "trained with ",
        "eval_rope_scaling": "evaluated with ",
    }
    return prefix.get(name, "") + value
