"""What devices send each other in one run of a compiled program, read from its HLO text."""

import dataclasses
import math
import re
from collections.abc import Iterator

KINDS = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(rf" = (.*?) ({'|'.join(KINDS)})(-start)?\(")
_CALLED = re.compile(r"(?:body|condition|calls|to_apply)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_LIMIT = re.compile(r" = s32\[\]\S* constant\((\d+)\)")
_CHANNEL = re.compile(r"channel_id=(\d+)")
# What a TPU runs as one reduce-scatter, and prints as an all-reduce of which each device keeps a slice.
_FUSED = "all-reduce-scatter"
_ARRAY = re.compile(r"\b([a-z]\w*?)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Of all collectives of a kind: how often they run, and the bytes that each device sends in all of these."""

    count: int
    bytes_sent: float


def traffic(hlo: str) -> dict[str, Traffic]:
    """The collectives of a program by kind. Those in a loop over a range count once for each of its steps.

    Of a collective of n devices that gathers, scatters or exchanges S bytes, a device sends at least
    ``S (n - 1) / n``, and twice that in an all-reduce.

    >>> from attnorm.training.collectives import traffic
    >>> traffic('''
    ... ENTRY %main (x: f32[4]) -> f32[8] {
    ...   ROOT %gather = f32[8]{0} all-gather(%x), replica_groups=[1,2]<=[2], dimensions={0}
    ... }''')
    {'all-gather': Traffic(count=1, bytes_sent=16.0)}
    """
    computations, entry = _computations(hlo)
    # One that runs beside computation appears where it starts, where it goes on and where it ends: by channel.
    executed: dict[str, tuple[int, str, float]] = {}
    for place, line, times in _executed(computations, entry, 1):
        if match := _COLLECTIVE.search(line):
            result, kind, is_async = match.groups()
            sent = _bytes_sent(kind, result, bool(is_async), line)
            if kind == "all-reduce" and place.startswith(_FUSED):
                kind, sent = "reduce-scatter", sent / 2
            channel = _CHANNEL.search(line)
            name = channel[1] if channel else line
            times = max(times, executed[name][0]) if name in executed else times
            executed[name] = times, kind, times * sent
    found = {}
    for kind in KINDS:
        of_kind = [(times, sent) for times, other, sent in executed.values() if other == kind]
        if of_kind:
            found[kind] = Traffic(*map(sum, zip(*of_kind, strict=True)))
    return found


def _computations(hlo: str) -> tuple[dict[str, list[str]], str]:
    computations: dict[str, list[str]] = {}
    entry, lines = "", list[str]()
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            lines = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif line.startswith(" "):
            lines.append(line)
    return computations, entry


def _executed(computations: dict[str, list[str]], name: str, times: int) -> Iterator[tuple[str, str, int]]:
    """The instructions of a computation and of those it calls, with its name and how often each is executed."""
    for line in computations.get(name, ()):
        yield name, line, times
        inner = times * _trips(line, computations)
        for one, several in _CALLED.findall(line):
            for called in [one] if one else several.split(", "):
                yield from _executed(computations, called.removeprefix("%"), inner)


def _trips(line: str, computations: dict[str, list[str]]) -> int:
    """Of a loop: as XLA says, or the limit that its condition compares with; 1 where neither is there."""
    if match := _TRIPS.search(line):
        return int(match[1])
    if match := _CONDITION.search(line):
        limits = [limit[1] for limit in map(_LIMIT.search, computations.get(match[1], ())) if limit]
        return int(limits[0]) if len(limits) == 1 else 1
    return 1


def _bytes_sent(kind: str, result: str, is_async: bool, line: str) -> float:
    sizes = [
        math.prod(map(int, filter(None, shape.split(",")))) * _bytes_of(dtype)
        for dtype, shape in _ARRAY.findall(result)
    ]
    devices = _group_size(line)
    if kind == "collective-permute":
        return sizes[0]
    if kind == "all-gather" and is_async:
        sizes = sizes[len(sizes) // 2 :]  # operands, then results
    if kind == "reduce-scatter":
        sizes = [devices * size for size in sizes]  # the operands'
    factor = 2 if kind == "all-reduce" else 1
    return factor * sum(sizes) * (devices - 1) / devices


def _bytes_of(dtype: str) -> float:
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) / 8 if bits else 1


def _group_size(line: str) -> int:
    if match := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(match[1])
    if match := re.search(r"replica_groups=\{\{([\d,]+)\}", line):
        return match[1].count(",") + 1
    if match := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", match[2]))
    return 1
