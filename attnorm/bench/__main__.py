"""Compare the O(T)-memory attention with jax.nn and, where installed, PyTorch: ``python -m attnorm.bench``.

Causal, batch 1, 8 heads of 64. Every contender has a process of its own and runs in turn with the others.
"""

import argparse
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from attnorm.bench.contenders import (
    BATCH,
    CONTENDERS,
    DTYPES,
    HEAD_DIM,
    HEADS,
    PASSES,
    PEERS,
    Case,
    available,
)
from attnorm.bench.runner import run_case

THREADS = 2


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    cases = [
        Case(length, dtype, direction)
        for dtype in options.dtypes
        for direction in options.passes
        for length in options.lengths
    ]
    report = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": _hardware(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "attnorm": _own_version(),
        },
        "settings": {
            "batch": BATCH,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "is_causal": True,
            "threads": THREADS,
            "rounds": options.rounds,
        },
        "cases": [],
    }
    for number, case in enumerate(cases, 1):
        progress = functools.partial(print, f"[{number}/{len(cases)}]", file=sys.stderr, flush=True)
        result = run_case(case, options.contenders, options.rounds, THREADS, progress)
        report["versions"] |= result.pop("versions")
        report["cases"].append(result)
        print(table(result), flush=True)
        if options.out:
            _replace(options.out, json.dumps(report, indent=1) + "\n")
    return 1 if any(case["failures"] for case in report["cases"]) else 0


def table(case: dict) -> str:
    """One case as text: a line for each contender, a column for the speed over each peer."""
    peers = [peer for peer in PEERS if peer in case["results"]]
    header = ["", "median ms", *(f"speed ÷ {peer}" for peer in peers), "extra MB"]
    lines = [header]
    for name, result in case["results"].items():
        speeds = (f"{case['speed_over'][name][peer]:.2f}" for peer in peers)
        memory = f"{result['peak_extra_bytes'] / 1e6:.0f}"
        lines.append([name, f"{1e3 * result['median_seconds']:.1f}", *speeds, memory])
    widths = [max(len(cell) for cell in column) for column in zip(*lines, strict=True)]
    text = [f"\n{case['direction'].replace('_', ' + ')}, {case['dtype']}, length {case['length']}"]
    for name, *cells in lines:
        cells = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        text.append("  ".join([f"  {name:<{widths[0]}}", *cells]))
    text += [f"  {name}: failed, {reason}" for name, reason in case["failures"].items()]
    return "\n".join(text)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m attnorm.bench", description=__doc__.replace("``", ""))
    parser.add_argument("--lengths", nargs="+", type=_positive, default=[1024, 2048, 4096], metavar="L")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument(
        "--rounds", type=_positive, default=6, help="an even number goes equally often through both orders"
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=available())
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, kept up to date after every case")
    options = parser.parse_args(arguments)
    missing = set(options.contenders) - set(available())
    if missing:
        parser.error(f"argument --contenders: {', '.join(missing)} is not installed")
    for name in ("lengths", "dtypes", "passes", "contenders"):
        values = getattr(options, name)
        if len(set(values)) < len(values):
            parser.error(f"argument --{name}: values are repeated: {' '.join(map(str, values))}")
    if options.out:
        try:
            options.out.touch(exist_ok=False)
        except FileExistsError:
            parser.error(f"argument --out: {options.out} exists; choose another name or remove it")
        except OSError as error:
            parser.error(f"argument --out: cannot write {options.out}: {error.strerror}")
    return options


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"a positive whole number is wanted, got {text!r}")
    return number


def _hardware() -> dict:
    try:
        with open("/proc/cpuinfo") as file:
            cpu = next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        cpu = platform.processor() or platform.machine()
    return {"cpu": cpu, "logical_cores": os.cpu_count(), "system": platform.platform()}


def _own_version() -> str:
    try:
        return importlib.metadata.version("attnorm")
    except importlib.metadata.PackageNotFoundError:
        return "a checkout that is not installed"


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)


if __name__ == "__main__":
    sys.exit(main())
