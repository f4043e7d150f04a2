"""What each normaliser costs in comparison with softmax, in the O(T)-memory attention, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from attnorm.attention import implementations_of
from attnorm.bench import contenders, report
from attnorm.bench.contenders import PASSES, Case

BASELINE = "softmax"


def run(
    normalizers: Sequence[str], length: int, dtype: str, rounds: int, progress: Callable[[str], None]
) -> dict:
    """The report: by normaliser and pass the time over softmax's of the same round, medians over rounds."""
    result = report.new_report(
        "measured cost of normalisers on cpu",
        implementation="chunked",
        length=length,
        dtype=dtype,
        rounds=rounds,
    )
    served = [name for name in normalizers if "chunked" in implementations_of(contenders.rule(name))]
    result |= {"ratios": {}, "not_served": [name for name in normalizers if name not in served]}
    for direction in PASSES:
        case = Case("cpu", length, dtype, direction)
        runs = {}
        for name in dict.fromkeys([BASELINE, *served]):
            progress(f"{case}: preparing {name}")
            runs[name], _ = contenders.prepare(f"chunked {name}", case, threads=None)
            _seconds(runs[name])
        progress(f"{case}: {rounds} rounds")
        for name, ratio in ratios(runs, rounds).items():
            result["ratios"].setdefault(name, {})[direction] = ratio
    return result


def ratios(runs: dict[str, Callable], rounds: int) -> dict[str, float]:
    """The median over rounds of each time over the baseline's; every second round goes backwards."""
    times = {name: [] for name in runs}
    for number in range(rounds):
        for name in runs if number % 2 == 0 else reversed(runs):
            times[name].append(_seconds(runs[name]))
    base = times[BASELINE]
    return {
        name: statistics.median(ours / theirs for ours, theirs in zip(own, base, strict=True))
        for name, own in times.items()
    }


def _seconds(call):
    import jax

    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def text(result: dict) -> str:
    """The report as a table."""
    rows = [["", *PASSES]]
    for name, by_pass in result["ratios"].items():
        rows.append([name, *(f"{by_pass[direction]:.2f}" for direction in PASSES)])
    settings = result["settings"]
    title = f"\nTime over softmax's, chunked, {settings['dtype']}, length {settings['length']}"
    return f"{report.table(title, rows)}\n  not served by chunked: {', '.join(result['not_served'])}"
