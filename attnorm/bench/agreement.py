"""How well static cycles agree with those of another counter: ``python -m attnorm.bench.agreement [REPORT]``.

``results/agreement.json`` holds what a counter that shares no code with :mod:`attnorm.bench.cycles` found for the
peers splash, flash and matmul, with the same JAX and libtpu. They are compared with a report of
``python -m attnorm.bench --static-cycles``, by default the committed one. Its programs are the same but for splash's
backward pass, where the other counter was given the gradient of a sum.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from attnorm.bench import report

_RESULTS = Path(__file__).parent / "results"
MOST = 0.02


def differences(counted: dict, other: dict) -> dict[tuple[str, str, str, str], float]:
    """By chip, row, pass and block the relative difference of the cycles, wherever the other counter has a figure.

    Raises:
      KeyError: a figure that the report lacks.
    """
    found = {}
    for chip, rows in other["chips"].items():
        for row, passes in rows.items():
            for direction, blocks in passes.items():
                for block, theirs in blocks.items():
                    ours = counted["chips"][chip][row][direction][block]["total"]
                    found[chip, row, direction, block] = ours / theirs - 1
    return found


def main(arguments: Sequence[str]) -> int:
    path = Path(arguments[0]) if arguments else _RESULTS / "static.json"
    found = differences(json.loads(path.read_text()), json.loads((_RESULTS / "agreement.json").read_text()))
    rows = [["", "pass", "block", "difference"]]
    rows += [[f"{chip}, {row}", *rest, f"{x:+.4%}"] for (chip, row, *rest), x in found.items()]
    print(report.table("Static cycles over those of another counter", rows))
    largest = max(map(abs, found.values()))
    print(f"largest difference {largest:.4%}, at most {MOST:.0%}")
    return 0 if largest <= MOST else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
