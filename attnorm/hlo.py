"""What a compiled program sends between devices, how often, and what runs meanwhile, read from its HLO text."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\]")
_CALLED = re.compile(
    r"\b(?:body|condition|to_apply|calls|called_computations|branch_computations|true_computation"
    r"|false_computation)=(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-]+)")
_NUM_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
# What a TPU runs as one reduce-scatter, and prints as an all-reduce of which each device keeps a slice.
_FUSED = "all-reduce-scatter"


@dataclass(frozen=True)
class Collective:
    """One instruction: the bytes of the largest array that it gives, what each device sends in one run of it, of all
    its arrays, and how often it runs.

    ``is_overlapped``: work stands between its start and its end; None where it has no separate start, or where
    nobody asked. Loops whose number of steps depends on data count once.
    """

    kind: str
    bytes: int
    bytes_sent: float
    times: int
    is_in_loop: bool
    is_overlapped: bool | None


@dataclass(frozen=True)
class Traffic:
    """Of all collectives of a kind: how often they run, and the bytes that each device sends in all of these."""

    count: int
    bytes_sent: float


def traffic(hlo: str) -> dict[str, Traffic]:
    """The collectives of a program by kind. Those in a loop over a range count once for each of its steps.

    >>> from attnorm.hlo import traffic
    >>> traffic('''
    ... ENTRY %main (x: f32[4]) -> f32[8] {
    ...   ROOT %gather = f32[8]{0} all-gather(%x), replica_groups=[1,2]<=[2], dimensions={0}
    ... }''')
    {'all-gather': Traffic(count=1, bytes_sent=16.0)}
    """
    found = {kind: [one for one in collectives(hlo) if one.kind == kind] for kind in KINDS}
    return {
        kind: Traffic(sum(one.times for one in own), sum(one.times * one.bytes_sent for one in own))
        for kind, own in found.items()
        if own
    }


def collectives(hlo: str, work: str | None = None) -> list[Collective]:
    """Every collective of a program, with how often it runs.

    Of a collective of n devices that gathers, scatters or exchanges S bytes, a device sends at least
    ``S (n - 1) / n``, and twice that in an all-reduce.

    ``work`` is a part of the instructions that count as work, such as ``"tpu_custom_call"``; loops and branches that
    hold some are work too. What stands between a start and an end is told by a scheduled program alone.

    >>> from attnorm.hlo import collectives
    >>> hlo = '''
    ... ENTRY %main (x: f32[4]) -> f32[4] {
    ...   %x = f32[4]{0} parameter(0)
    ...   %s = (f32[4]{0}, f32[4]{0}) collective-permute-start(%x), source_target_pairs={{0,1},{1,0}}
    ...   %y = f32[4]{0} custom-call(%x), custom_call_target="tpu_custom_call"
    ...   ROOT %d = f32[4]{0} collective-permute-done(%s)
    ... }'''
    >>> [one] = collectives(hlo, "tpu_custom_call")
    >>> one.kind, one.bytes, one.times, one.is_overlapped
    ('collective-permute', 16, 1, True)
    """
    program = _Program(hlo)

    def is_work(instruction):
        return work in instruction.rest or any(map(is_work, program.inside(instruction)))

    # One that runs beside computation appears where it starts, where it goes on and where it ends.
    found: dict[str, Collective] = {}
    for name, one in program.collectives(is_work if work is not None else None):
        if (other := found.get(name)) is not None:
            is_overlapped = other.is_overlapped if one.is_overlapped is None else one.is_overlapped
            one = replace(one, times=max(one.times, other.times), is_overlapped=is_overlapped)
        found[name] = one
    return list(found.values())


@dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    operation: str
    rest: str

    @property
    def called(self) -> list[str]:
        return [name for names in _CALLED.findall(self.rest) for name in re.findall(r"[\w.\-]+", names)]


class _Program:
    """The computations of a module, each a list of instructions."""

    def __init__(self, hlo: str):
        self.computations: dict[str, list[_Instruction]] = {}
        self.entry = ""
        current = []
        for line in hlo.splitlines():
            if header := _COMPUTATION.match(line):
                current = self.computations.setdefault(header[2], [])
                self.entry = header[2] if header[1] else self.entry
            elif match := _INSTRUCTION.match(line):
                current.append(_Instruction(*match.groups()))
        header = re.search(r"^HloModule .*", hlo, re.MULTILINE)
        sizes = _NUM_DEVICES.findall(header[0]) if header else []
        self.num_devices = math.prod(map(int, sizes))

    def inside(self, instruction: _Instruction) -> Iterator[_Instruction]:
        """The instructions of the computations that it calls."""
        for name in instruction.called:
            yield from self.computations.get(name, ())

    def collectives(self, is_work: Callable | None) -> Iterator[tuple[str, Collective]]:
        """Each with what tells it from others, wherever it appears."""
        yield from self._collectives(is_work, self.entry, 1, False, False, None)

    def _collectives(self, is_work, computation, times, is_in_loop, is_wrapped, is_outer_overlapped):
        instructions = self.computations.get(computation, [])
        for at, one in enumerate(instructions):
            is_overlapped = is_outer_overlapped
            if one.operation.endswith("-start") and is_work is not None:
                is_overlapped = any(map(is_work, _until_done(instructions[at + 1 :], one.name)))
            kind = one.operation.removesuffix("-start")
            if kind in KINDS:
                sizes = _bytes_given(one)
                sent = sum(sizes) * self._parts_sent(kind, one)
                if kind == "all-reduce" and computation.startswith(_FUSED):
                    kind, sent = "reduce-scatter", sent / 2
                channel = _CHANNEL.search(one.rest)
                # Copies of what is wrapped share its channel; on CPUs all collectives have the same.
                name = channel[0] if channel and is_wrapped else f"{computation}: {one.name} = {one.rest}"
                yield name, Collective(kind, max(sizes), sent, times, is_in_loop, is_overlapped)
            inner = times * self._trips(one)
            wrapped = is_wrapped or one.operation not in ("while", "conditional")
            for called in one.called:
                in_loop = is_in_loop or one.operation == "while"
                yield from self._collectives(is_work, called, inner, in_loop, wrapped, is_overlapped)

    def _parts_sent(self, kind, instruction) -> float:
        """What a device sends, in units of what it is given."""
        if kind == "collective-permute":
            return 1
        devices = _group_size(instruction.rest) or self.num_devices
        if kind == "reduce-scatter":
            return devices - 1
        return (2 if kind == "all-reduce" else 1) * (devices - 1) / devices

    def _trips(self, instruction) -> int:
        """Of a loop: as XLA says, or the limit that its condition compares with; 1 where neither is there."""
        if instruction.operation != "while":
            return 1
        if match := _TRIPS.search(instruction.rest):
            return int(match[1])
        name = _CONDITION.search(instruction.rest)
        condition = self.computations.get(name[1], []) if name else []
        counts_up = any("direction=LT" in other.rest for other in condition)
        limits = [other.rest for other in condition if other.operation == "constant"]
        return int(limits[0].split(")")[0]) if counts_up and len(limits) == 1 else 1


def _until_done(instructions, start):
    for instruction in instructions:
        if instruction.operation.endswith("-done") and re.search(rf"%{re.escape(start)}\b", instruction.rest):
            return
        yield instruction


def _bytes_given(instruction) -> list[int]:
    """Of the result, or of each of a tuple of them; a start gives its operands too, which are left out."""
    sizes = [
        math.prod(map(int, filter(None, shape.split(",")))) * _bits(dtype) // 8
        for dtype, shape in _ARRAY.findall(instruction.type)
    ]
    if instruction.operation == "all-gather-start":
        return sizes[len(sizes) // 2 :]
    return sizes[:1] if instruction.operation == "collective-permute-start" else sizes


def _bits(dtype) -> int:
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) if bits else 8


def _group_size(rest) -> int | None:
    """How many devices take part; None where it is all of them."""
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", rest):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
        return match[1].count(",") + 1
    if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", rest):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    return None
