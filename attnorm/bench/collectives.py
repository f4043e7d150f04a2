"""What a compiled program sends between devices, how often, and what runs meanwhile, by its HLO text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:body|to_apply|calls|called_computations|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_KINDS = ("collective-permute", "all-gather", "all-reduce", "reduce-scatter", "all-to-all")


@dataclass(frozen=True)
class Collective:
    """One instruction: the bytes of the largest array that it gives, and how often it runs.

    ``is_overlapped``: work stands between its start and its end; None where it has no separate start. Loops
    whose number of trips depends on data count once.
    """

    kind: str
    bytes: int
    times: int
    is_in_loop: bool
    is_overlapped: bool | None


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    operation: str
    rest: str

    @property
    def called(self) -> list[str]:
        return [name for names in _CALLED.findall(self.rest) for name in re.findall(r"[\w.\-]+", names)]

    @property
    def bytes(self) -> int:
        return max(
            math.prod(int(n) for n in shape.split(",") if n) * (int(bits or 8) // 8)
            for _, bits, shape in _ARRAY.findall(self.type)
        )


def collectives(hlo: str, work: str) -> list[Collective]:
    """Every collective of a scheduled HLO module, with how often it runs.

    ``work`` is a part of the instructions that count as work, such as ``"tpu_custom_call"``; loops and
    branches that hold some are work too.

    >>> from attnorm.bench.collectives import collectives
    >>> hlo = '''
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   %s = (f32[4]{0}, f32[4]{0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
    ...   %y = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call"
    ...   ROOT %d = f32[4]{0} collective-permute-done(%s)
    ... }'''
    >>> collectives(hlo, "tpu_custom_call")
    [Collective(kind='collective-permute', bytes=16, times=1, is_in_loop=False, is_overlapped=True)]
    """
    entry, computations = _parsed(hlo)

    def is_work(instruction):
        return work in instruction.rest or any(
            is_work(other) for name in instruction.called for other in computations.get(name, ())
        )

    return list(_found(computations, is_work, entry, 1, False))


def _parsed(hlo) -> tuple[str, dict[str, list[_Instruction]]]:
    computations: dict[str, list[_Instruction]] = {}
    entry, current = "", list[_Instruction]()
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header[2]] = []
            entry = header[2] if header[1] else entry
        elif match := _INSTRUCTION.match(line):
            current.append(_Instruction(*match.groups()))
    return entry, computations


def _found(
    computations: dict, is_work: Callable, name: str, times: int, is_in_loop: bool
) -> Iterator[Collective]:
    instructions = computations.get(name, [])
    for at, instruction in enumerate(instructions):
        kind = instruction.operation.removesuffix("-start")
        if kind in _KINDS:
            is_overlapped = None
            if kind != instruction.operation:
                is_overlapped = any(map(is_work, _until_done(instructions[at + 1 :], instruction.name)))
            yield Collective(kind, instruction.bytes, times, is_in_loop, is_overlapped)
        trips = _trips(computations, instruction)
        for called in instruction.called:
            in_loop = is_in_loop or instruction.operation == "while"
            yield from _found(computations, is_work, called, times * trips, in_loop)


def _trips(computations, instruction) -> int:
    """How often a loop runs. TPU programs tell it by a condition that compares with a constant alone."""
    if instruction.operation != "while":
        return 1
    if match := _TRIPS.search(instruction.rest):
        return int(match[1])
    called = _CONDITION.search(instruction.rest)
    assert called, instruction.rest
    condition = computations.get(called[1], [])
    counts_up = any("direction=LT" in other.rest for other in condition)
    limits = [other.rest for other in condition if other.operation == "constant"]
    return int(limits[0].split(")")[0]) if counts_up and len(limits) == 1 else 1


def _until_done(instructions, start):
    for instruction in instructions:
        if instruction.operation.endswith("-done") and re.search(rf"%{re.escape(start)}\b", instruction.rest):
            return
        yield instruction
