"""What every report holds beside its numbers, and how it is printed and written."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_PACKAGES = ("attnorm", "jax", "jaxlib", "libtpu", "numpy")


@dataclass(frozen=True)
class Bar:
    """A number and what it must reach: at least ``limit`` where ``at_least``, else at most."""

    text: str
    value: float
    limit: float
    at_least: bool = False

    @property
    def passed(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    def __str__(self):
        verdict = "pass" if self.passed else "FAIL"
        return f"{verdict}  {self.text}: {self.value:.3f}, at {'least' if self.at_least else 'most'} {self.limit:g}"


def new_report(kind: str, **settings) -> dict:
    """Date, machine, versions and commit; ``kind`` keeps measured and static figures apart."""
    return {
        "kind": kind,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": _cpu(), "logical_cores": os.cpu_count(), "system": platform.platform()},
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "settings": settings,
    }


def write(report: dict, path: Path) -> None:
    """Replaces the file in one step, so that a run that is stopped leaves the last whole report."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(json.dumps(report, indent=1) + "\n")
    temporary.replace(path)


def table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Text in columns, the first aligned left.

    >>> print(table("Speed", [["", "ms"], ["l2", "10.0"]]))
    Speed
            ms
      l2  10.0
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [title]
    for first, *cells in rows:
        aligned = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([f"  {first:<{widths[0]}}", *aligned]).rstrip())
    return "\n".join(lines)


def reason(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"


def _cpu():
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _versions():
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "a checkout that is not installed" if package == "attnorm" else None
    return {package: version for package, version in versions.items() if version}


def _commit():
    """Of the checkout that this file is in, with a + where files differ from it; None where there is none."""
    folder = Path(__file__).parent

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", folder, *arguments], capture_output=True, text=True, check=True
        ).stdout

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "..")
        return git("rev-parse", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
