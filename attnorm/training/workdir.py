"""The workdir: one experiment with one config, from its first start on."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
METRICS_CSV = "metrics.csv"
EVALUATIONS = "evaluations.jsonl"
TENSORBOARD = "tensorboard"


class WorkdirError(RuntimeError):
    """A workdir that this run must not or cannot write to."""


def write_atomically(path: Path, text: str) -> None:
    """The whole text or, whenever the process is killed, what was there before."""
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def claim(workdir: Path, config: Mapping[str, Any], outputs: Sequence[str]) -> None:
    """Makes the workdir this config's own, or checks that it is; writes nothing where it is not.

    Args:
      workdir: made where it does not exist.
      config: what JSON can hold; written once.
      outputs: the files, beside the loop's own, that the run will write.

    Raises:
      WorkdirError: the workdir cannot be written, holds another config, or holds files that would be overwritten.
    """
    config = json.loads(json.dumps(config))
    path = workdir / CONFIG
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _compare(path, config)
            if not os.access(workdir, os.W_OK):
                raise PermissionError(13, "Permission denied")
            return
        ours = (CHECKPOINTS, METRICS, METRICS_CSV, EVALUATIONS, TENSORBOARD, *outputs)
        foreign = [name for name in ours if (workdir / name).exists()]
        if foreign:
            raise WorkdirError(
                f"{workdir} holds {', '.join(foreign)} but no {CONFIG}: these files are not from this experiment and "
                f"would be overwritten. Choose another --workdir."
            )
        write_atomically(path, json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise WorkdirError(f"cannot write to --workdir={workdir}: {error.strerror}") from error


def _compare(path: Path, config: Mapping[str, Any]) -> None:
    try:
        found = _flat(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, AttributeError) as error:
        raise WorkdirError(
            f"{path} is not the config of an experiment: {error}. Choose another --workdir."
        ) from error
    wanted = _flat(config)
    if found.get("experiment") != wanted["experiment"]:
        raise WorkdirError(
            f"{path.parent} holds the experiment {found.get('experiment')!r}, not {wanted['experiment']!r}. "
            "Choose another --workdir."
        )
    changed = [
        f"{key} was {found.get(key, 'absent')!r}, now {wanted.get(key, 'absent')!r}"
        for key in sorted(found.keys() | wanted.keys())
        if found.get(key, KeyError) != wanted.get(key, KeyError)
    ]
    if changed:
        raise WorkdirError(
            f"{path.parent} was started with another config ({'; '.join(changed)}). Run with the same config to "
            "resume, or choose another --workdir."
        )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
