"""The command: measures, draws and judges, a figure at a time, and goes on where it was interrupted."""

import collections
import csv
import dataclasses
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tqdm

from attnorm.analysis.files import csv_bytes, png_bytes, write_atomically
from attnorm.analysis.selection import measure
from attnorm.analysis.selection.figures import draw
from attnorm.analysis.selection.options import Options
from attnorm.analysis.selection.summary import as_text, summarize
from attnorm.analysis.sources import Source, excerpts
from attnorm.normalizers import Normalizer, get_normalizer
from attnorm.normalizers.lp import Lp
from attnorm.normalizers.spec import parse_normalizer

SETTINGS = "settings.json"
_VERSION = 2  # raised where the same settings no longer give the same tables
# Name in file names and tables -> the measurement, and how many passes over the texts it takes.
_MEASUREMENTS: Mapping[str, tuple[Callable[[measure.Study], list[dict]], Callable[[Options], int]]] = {
    "2a": (measure.distance_by_length, lambda options: len(options.lengths)),
    "2b": (measure.distance_by_num_selected, lambda options: 1),
    "2c": (measure.critical_num_selected, lambda options: len(options.lengths)),
    "3": (measure.separability, lambda options: 1),
    "4": (measure.gradients, lambda options: 1),
    "heads": (measure.heads, lambda options: 1),
}
FIGURES = ("2a", "2b", "2c", "3", "4")


class SettingsError(Exception):
    """The folder holds results of other settings, or what is no result."""


def run(
    source: Source,
    texts: np.ndarray,
    out: Path,
    options: Options,
    rules: Mapping[str, Normalizer],
    *,
    model: str,
    text_name: str,
) -> list[Path]:
    """Writes the five figures as CSV and PNG, ``heads.csv``, ``summary.csv`` and ``.md`` into a folder.

    What is there already is not measured again; each file appears whole.

    Args:
      source: a model.
      texts: token ids (M, T), see :class:`attnorm.analysis.selection.measure.Study`.
      out: the folder, made if missing.
      options: of the measurements.
      rules: of :func:`parse_rules`; those that are not the model's own are applied to its logits.
      model: the model as it was asked for, for the settings.
      text_name: what the texts are, for the settings.

    Returns:
      All the files' paths.

    Raises:
      SettingsError: the folder holds results of other settings, files of these names with no settings, or a table
        that was damaged since it was written.
      ValueError: texts or lengths that do not fit; see Study. Nothing is written then.
      FloatingPointError: logits that are not finite.
    """
    study = measure.Study(source, texts, rules, options)
    settings = {
        "version": _VERSION,
        "model": model,
        "text": text_name,
        "tokens": hashlib.sha256(np.ascontiguousarray(texts, np.int64).tobytes()).hexdigest()[:16],
        "normalizers": list(rules),
        **dataclasses.asdict(options),
    }
    _claim(out, json.loads(json.dumps(settings)))
    own = _own_normalizer(source)
    labels = {name: name if rule == own else f"{name} (re-normalised)" for name, rule in rules.items()}
    passes = {
        name: options.num_texts * count(options)
        for name, (_, count) in _MEASUREMENTS.items()
        if not _csv_path(out, name).exists()
    }
    with tqdm.tqdm(total=sum(passes.values()), unit="pass", disable=not passes, file=sys.stderr) as bar:
        study = dataclasses.replace(study, tick=bar.update)
        for name, (measurement, _) in _MEASUREMENTS.items():
            bar.set_description(f"figure {name}" if name in FIGURES else name)
            if not _csv_path(out, name).exists():
                table = measurement(study)
                for row in table:
                    row["normalizer"] = labels[row["normalizer"]]
                write_atomically(_csv_path(out, name), csv_bytes(table))
            png = _csv_path(out, name).with_suffix(".png")
            if name in FIGURES and not png.exists():
                title = f"{_describe(source)}, {text_name}: {_TITLES[name]}"
                write_atomically(png, png_bytes(draw(name, _table(out, name, labels.values()), title)))
    in_scope = {labels[name]: isinstance(rule, Lp) and float(rule.p) == 1 for name, rule in rules.items()}
    summary = summarize({name: _table(out, name, labels.values()) for name in FIGURES}, in_scope)
    write_atomically(out / "summary.csv", csv_bytes(summary))
    text = as_text(summary, f"{_describe(source)}, {text_name}, L = {options.lengths[-1]}")
    write_atomically(out / "summary.md", text.encode())
    return [out / name for name in _FILES]


_FILES = (
    *(f"figure_{name}{suffix}" for name in FIGURES for suffix in (".csv", ".png")),
    "heads.csv",
    "summary.csv",
    "summary.md",
)
_TITLES = {
    "2a": "distance against the length",
    "2b": "distance against the number of selected keys",
    "2c": "where selection is no better than chance",
    "3": "separability",
    "4": "sensitivity",
}


def parse_rules(names: Sequence[str]) -> dict[str, Normalizer]:
    """Normalisers spelled ``"l2"`` or ``"lp(p=3)"``, by their spelling.

    Raises:
      ValueError, TypeError: as :func:`attnorm.normalizers.spec.parse_normalizer`.
    """
    rules = {}
    for name in names:
        base, params = parse_normalizer(name)
        rules[name] = get_normalizer(base, **params)
    return rules


def make_texts(source: Source, text: str | None, options: Options) -> np.ndarray:
    """The texts of a study: pieces of a text, or what the source itself gives as examples.

    Raises:
      ValueError: a text shorter than the largest length times the number of texts, or a length that is too
        long.
    """
    longest = options.lengths[-1]
    if longest > source.max_length:
        raise ValueError(
            f"lengths must be at most {source.max_length}, what {source.name} can read, got {longest}"
        )
    if text is None:
        return np.asarray(source.example_tokens(longest, options.num_texts))
    return np.asarray(excerpts(source, text, longest, options.num_texts))


def _own_normalizer(source):
    """What the model was trained with; the synthetic heads are defined by their softmax."""
    return getattr(source, "normalizer", get_normalizer("softmax"))


def _describe(source):
    kind = "causal" if source.is_causal else "bidirectional, not comparable with causal models"
    return f"{source.name} ({kind})"


def _csv_path(out: Path, name: str) -> Path:
    return out / (f"figure_{name}.csv" if name in FIGURES else f"{name}.csv")


def _claim(out: Path, settings: dict) -> None:
    """Makes the folder that of these settings, or checks that it is."""
    path = out / SETTINGS
    if path.exists():
        try:
            found = dict(json.loads(path.read_text()))
        except (TypeError, ValueError):
            raise SettingsError(f"{path} is damaged; choose another folder") from None
        other = [key for key in settings | found if settings.get(key) != found.get(key)]
        if other:
            shown = ", ".join(f"{key} {found.get(key)!r}, not {settings.get(key)!r}" for key in other)
            raise SettingsError(f"{out} holds results of other settings: {shown}. Choose another folder")
        return
    strays = [name for name in _FILES if (out / name).exists()]
    if strays:
        raise SettingsError(f"{out} holds {', '.join(strays)} but no {SETTINGS}; choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, (json.dumps(settings, indent=1) + "\n").encode())


def _table(out: Path, name: str, labels: Iterable[str]) -> list[dict]:
    """A table that was written whole, and may have been touched since."""
    try:
        table = _read(out, name)
    except (csv.Error, TypeError, UnicodeDecodeError):
        table = []
    counts = collections.Counter(row.get("normalizer") for row in table)
    words = {key for row in table for key, value in row.items() if isinstance(value, str)}
    if set(counts) != set(labels) or len(set(counts.values())) != 1 or words != {"normalizer"}:
        raise SettingsError(
            f"{_csv_path(out, name)} is damaged: delete it, and the same command measures it again"
        )
    return table


def _read(out: Path, name: str) -> list[dict]:
    with open(_csv_path(out, name), encoding="utf-8", newline="") as file:
        return [{key: _number(value) for key, value in row.items()} for row in csv.DictReader(file)]


def _number(text: str):
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return text
