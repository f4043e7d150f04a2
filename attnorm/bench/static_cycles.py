"""Counts the cycles of our TPU kernels and of their peers, and holds them against the bars."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from attnorm.bench import report, tpu_kernels
from attnorm.bench.cycles import CHIPS, count_cycles
from attnorm.bench.topology import compile_for, require_libtpu

OWN_SCALE = "l2, scale in the kernel"
SPLASH, SPLASH_FUSED = "splash", "splash, fused backward"
PASSES = ("forward", "backward")


def subjects(normalizers: Sequence[str], block: int) -> dict[str, Callable[[], tpu_kernels.Subject]]:
    """What is counted, by row of the table."""
    ours = {
        row: functools.partial(tpu_kernels.attention, row, block) for row in tpu_kernels.rows(normalizers)
    }
    return {
        **ours,
        # A call with the default scale, which rounds the queries one time less.
        OWN_SCALE: functools.partial(tpu_kernels.attention, "l2", block, scale=None),
        SPLASH: functools.partial(tpu_kernels.splash, block, fused=False),
        SPLASH_FUSED: functools.partial(tpu_kernels.splash, block, fused=True),
        "flash": functools.partial(tpu_kernels.flash, block),
        "matmul": functools.partial(tpu_kernels.matmul, block),
    }


def run(
    chips: Sequence[str], normalizers: Sequence[str], blocks: Sequence[int], progress: Callable[[str], None]
) -> dict:
    """The report: for each chip, row, pass and block the cycles; ``failures`` says what did not compile."""
    require_libtpu()
    result = report.new_report(
        "static cycles, counted and not measured",
        heads=tpu_kernels.HEADS,
        length=tpu_kernels.LENGTH,
        head_dim=tpu_kernels.HEAD_DIM,
        dtype="bfloat16",
        is_causal=True,
        blocks=list(blocks),
    )
    result |= {"chips": {}, "failures": [], "bars": []}
    for name in chips:
        cycles: dict[str, dict] = {}
        result["chips"][name] = cycles
        for block in blocks:
            for row, build in subjects(normalizers, block).items():
                progress(f"{name}, blocks of {block}: {row}")
                try:
                    counted = _count(build(), CHIPS[name])
                except Exception as error:  # such as too little vector memory; the others go on
                    result["failures"].append(f"{name}, blocks of {block}, {row}: {report.reason(error)}")
                    continue
                for direction, numbers in counted.items():
                    cycles.setdefault(row, {}).setdefault(direction, {})[str(block)] = numbers
        result["bars"] += [dataclasses.asdict(bar) for bar in bars(name, cycles)]
    return result


def _count(subject, chip):
    program = compile_for(chip.topology, subject.function, subject.arguments)
    counted = {}
    for direction, part in subject.passes.items():
        found = [count_cycles(kernel, chip) for kernel in program.kernels if part in kernel.name]
        if not found:
            raise LookupError(f"no kernel of the program is called {part!r}")
        numbers = {key: sum(x.asdict()[key] for x in found) for key in found[0].asdict()}
        numbers["vmem_bytes"] = max(x.vmem_bytes for x in found)
        numbers["matmul_share"] = sum(x.matmul_share * x.total for x in found) / numbers["total"]
        numbers["kernels"] = len(found)
        extra = (subject.extra_bytes or {}).get(direction, 0) / chip.hbm_bytes_per_cycle / chip.cores
        numbers["sums_after"] = round(extra)
        numbers["total"] += numbers["sums_after"]
        counted[direction] = numbers
    return counted


def best(cycles: dict, row: str, direction: str) -> float | None:
    """The total cycles at the better block, or None where nothing was counted."""
    totals = [numbers["total"] for numbers in cycles.get(row, {}).get(direction, {}).values()]
    return min(totals, default=None)


# The row, the pass, the row that it is compared with, and the most that the ratio may be: on all chips or by chip.
_BARS: list[tuple[str, str, str, float | dict[str, float]]] = [
    ("l2", "forward", SPLASH, 1.00),
    ("l2", "backward", SPLASH, {"v5e": 0.78, "v5p": 0.55, "v6e": 0.78}),
    ("l2", "backward", SPLASH_FUSED, 1.05),
]
for _direction in PASSES:
    _BARS.append(("l2", _direction, "softmax", {"v5e": 1.03, "v5p": 1.03, "v6e": 1.10}))
    # The rules with one exponential and one numerator.
    for _row in ("lp, p = 3", "sink, b per head", "softmax_plus_n", "linf"):
        _BARS.append((_row, _direction, "l2", {"v5e": 1.15, "v5p": 1.15, "v6e": 1.25}))
    _BARS.append(("lp, p per head", _direction, "l2", 1.25))


def bars(chip: str, cycles: dict) -> list[report.Bar]:
    """The ratios that are bounded, where both sides were counted."""
    result = []
    for row, direction, other, limit in _BARS:
        ours, theirs = best(cycles, row, direction), best(cycles, other, direction)
        if ours and theirs:
            limit = limit[chip] if isinstance(limit, dict) else limit
            result.append(report.Bar(f"{chip} {direction}, {row} / {other}", ours / theirs, limit))
    return result


def text(result: dict) -> str:
    """The report as tables, one for each chip, and the bars."""
    parts = [f"Static cycles in thousands ({result['kind']}), {result['settings']}"]
    header = [
        "",
        "block",
        "compute",
        "DMA stall",
        "sums after",
        "total",
        "matmul units",
        "VMEM MiB",
        "code bundles",
    ]
    for chip, cycles in result["chips"].items():
        for direction in PASSES:
            rows = [header]
            for row, counted in cycles.items():
                for block, x in counted.get(direction, {}).items():
                    thousands = [
                        f"{x[key] / 1e3:.0f}" for key in ("compute", "dma_stall", "sums_after", "total")
                    ]
                    share, memory = f"{x['matmul_share']:.0%}", f"{x['vmem_bytes'] / 2**20:.1f}"
                    rows.append([row, block, *thousands, share, memory, str(x["code_bundles"])])
            parts.append(report.table(f"\n{chip}, {direction}", rows))
    parts += ["", *(str(report.Bar(**bar)) for bar in result["bars"])]
    return "\n".join([*parts, *(f"failed: {failure}" for failure in result["failures"])])
