"""The workdir: one experiment with one config, from its first start on."""

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

CONFIG = "config.json"
DATA = "data.json"
CHECKPOINTS = "checkpoints"
METRICS = "metrics.jsonl"
METRICS_CSV = "metrics.csv"
EVALUATIONS = "evaluations.jsonl"
TENSORBOARD = "tensorboard"
PROFILE = "profile"
LOCK = "lock"

# Where a run computes, which may change from start to start; the config tells the first.
_MAY_CHANGE = ("mesh.",)


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


@contextlib.contextmanager
def claimed(
    workdir: Path, config: Mapping[str, Any], outputs: Sequence[str], data: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Makes the workdir this config's own, or checks that it is; writes nothing where it is not.

    Until the context ends, or the process dies, no other run can claim it. Windows and file systems without locks
    cannot enforce this.

    Args:
      workdir: made where it does not exist.
      config: what JSON can hold; written once.
      outputs: the files, beside the loop's own, that the run will write.
      data: a "fingerprint", and "facts" for messages; of what the run reads beside the config, if it reads any. A
        workdir that has checkpoints and does not tell their data, of a run before that was kept, takes these; that is
        printed.

    Raises:
      WorkdirError: the workdir cannot be written, holds a config that differs in more than the mesh, is of a run on
        other data, holds files that would be overwritten, or another run is using it.
    """
    config = json.loads(json.dumps(config))
    with contextlib.ExitStack() as stack:
        try:
            workdir.mkdir(parents=True, exist_ok=True)
            _check(workdir, config, outputs, data)
            stack.enter_context(locked(workdir, "--workdir"))
            if not _check(workdir, config, outputs, data):  # again: another run may have been there first
                write_atomically(workdir / CONFIG, json.dumps(config, indent=2) + "\n")
            if data and not (workdir / DATA).exists():
                if (workdir / CHECKPOINTS).exists():
                    print(
                        f"{workdir} has no {DATA}: whether its checkpoints are of the same data is not known; from "
                        f"here on they are {data['facts']} ({data['fingerprint']})",
                        flush=True,
                    )
                write_atomically(workdir / DATA, json.dumps(data, indent=2) + "\n")
        except OSError as error:
            raise WorkdirError(f"cannot write to --workdir={workdir}: {error.strerror}") from error
        yield


def _check(
    workdir: Path, config: Mapping[str, Any], outputs: Sequence[str], data: Mapping[str, str] | None
) -> bool:
    """Whether the workdir is already this config's own; an error where it cannot become that."""
    path = workdir / CONFIG
    if path.exists():
        _compare(path, config)
        if data and (workdir / DATA).exists():
            _compare_data(workdir / DATA, data)
        if not os.access(workdir, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return True
    ours = (DATA, CHECKPOINTS, METRICS, METRICS_CSV, EVALUATIONS, TENSORBOARD, PROFILE, *outputs)
    foreign = [name for name in ours if (workdir / name).exists()]
    if foreign:
        raise WorkdirError(
            f"{workdir} holds {', '.join(foreign)} but no {CONFIG}: these files are not from this experiment and "
            f"would be overwritten. Choose another --workdir."
        )
    return False


@contextlib.contextmanager
def locked(folder: Path, option: str) -> Iterator[None]:
    """Until the context ends, or the process dies, the folder, an argument of that option, is this run's.

    Raises:
      WorkdirError: it is another's.
      OSError: it cannot be written.
    """
    with open(folder / LOCK, "a", encoding="utf-8") as file:
        try:
            _lock(file)
        except BlockingIOError:
            raise WorkdirError(
                f"{folder} is in use by another run. Wait for its end, or choose another {option}."
            ) from None
        yield  # the system releases the lock when the file is closed, also by a kill


def _lock(file: TextIO) -> None:
    """Locks the file, where the system can."""
    try:
        import fcntl
    except ModuleNotFoundError:  # not POSIX
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise


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
        if found.get(key, KeyError) != wanted.get(key, KeyError) and not key.startswith(_MAY_CHANGE)
    ]
    if changed:
        raise WorkdirError(
            f"{path.parent} was started with another config ({'; '.join(changed)}). Run with the same config to "
            "resume, or choose another --workdir."
        )


def _compare_data(path: Path, wanted: Mapping[str, str]) -> None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        was, fingerprint = found["facts"], found["fingerprint"]
    except (KeyError, TypeError, ValueError) as error:
        raise WorkdirError(
            f"{path} is damaged: {error!r}. Restore it, or choose another --workdir."
        ) from error
    if fingerprint != wanted["fingerprint"]:
        raise WorkdirError(
            f"{path.parent} was started with other data: {was} ({fingerprint}); now {wanted['facts']} "
            f"({wanted['fingerprint']}). Restore the data to resume, or choose another --workdir."
        )


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat
