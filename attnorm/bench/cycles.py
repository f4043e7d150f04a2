"""Cycles of a compiled kernel, counted and not measured.

A core issues one bundle per cycle. To the bundles issued come cycles in which a matrix unit is given more products
than it can take in, and, apart from these, a modelled wait for transfers. The estimate is good to 5 or 10 % and for
comparing kernels on one chip with blocks of 512 and more; it is no time.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass

from attnorm.bench import bundles
from attnorm.bench.scalar_unit import DELAY_SLOTS, run
from attnorm.bench.topology import CompiledKernel


@dataclass(frozen=True)
class Chip:
    """Per core, as published: bytes of memory bandwidth per cycle, rows of 16 bits that a matrix unit takes in."""

    topology: str
    cores: int
    hbm_bytes_per_cycle: float
    matmul_rows_per_cycle: int


CHIPS = {
    "v5e": Chip("v5e:2x2", 1, 819e9 / 1.5e9, 1),
    "v5p": Chip("v5p:2x2x1", 2, 2765e9 / 2 / 1.75e9, 1),
    "v6e": Chip("v6e:2x2", 1, 1640e9 / 1.75e9, 2),
}


@dataclass(frozen=True)
class Cycles:
    """Of the slowest core. ``compute`` is issue and over-subscription of the matrix units."""

    issue: int
    matmul_excess: int
    dma_stall: int
    matmul_share: float
    code_bundles: int
    vmem_bytes: int

    @property
    def compute(self) -> int:
        return self.issue + self.matmul_excess

    @property
    def total(self) -> int:
        return self.compute + self.dma_stall

    def asdict(self) -> dict:
        return {**dataclasses.asdict(self), "compute": self.compute, "total": self.total}


def count_cycles(kernel: CompiledKernel, chip: Chip) -> Cycles:
    """Runs the kernel's scalar code and counts."""
    program = bundles.parse(kernel.bundles)
    slowest = max(
        run(program, kernel.tables, chip.hbm_bytes_per_cycle, chip.cores), key=lambda core: core.cycles
    )
    busy, excess = _matmul_cycles(program, slowest.counts, chip.matmul_rows_per_cycle)
    issue = sum(slowest.counts)
    return Cycles(
        issue,
        round(excess),
        round(slowest.stall_cycles),
        busy / (issue + excess + slowest.stall_cycles),
        len(program.bundles),
        kernel.vmem_bytes,
    )


def _matmul_cycles(program, counts, rows_per_cycle):
    """Cycles that the busiest matrix unit works, and those by which it outlasts the bundles of its block of code."""
    busy = excess = 0
    for start, end in _blocks(program, counts):
        work: dict[str, float] = defaultdict(float)
        for bundle in program.bundles[start:end]:
            for name in bundle.matmuls:
                rows = 8 if "f32" in name else 16
                work[name.rpartition(".")[2]] += rows / rows_per_cycle
        longest = max(work.values(), default=0)
        busy += longest * counts[start]
        excess += max(0, longest - (end - start)) * counts[start]
    return busy, excess


def _blocks(program, counts):
    """Stretches of bundles that are issued one after the other."""
    cuts = {0, len(counts)}
    cuts |= {at for at in range(1, len(counts)) if counts[at] != counts[at - 1]}
    for at, bundle in enumerate(program.bundles):
        if any(operation.name == "sbr.rel" for operation in bundle.scalar):
            cuts.add(min(at + 1 + DELAY_SLOTS, len(counts)))
    ends = sorted(cuts)
    return zip(ends, ends[1:], strict=False)
