"""Runs the scalar code of a kernel, to see how often each of its bundles is issued.

The scalar unit decides which bundles come next: loops over the grid, skipped tiles, transfers. What it computes
depends on shapes and on tables in scalar memory, which are known when a kernel is compiled, and nowhere on vectors,
with two exceptions, which reach it by ``spop``. Two cores that work together exchange a number, and halt if it is
wrong. And our kernels ask whether their data are ordinary: finite and of moderate size. Every ``spop`` is answered
as if all data were zero, and zeros are ordinary; so the paths for NaN and infinity count as never taken, and the
question itself is counted.
"""

from __future__ import annotations

import operator
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from attnorm.bench.bundles import Operation, Program, register

# A branch takes effect after so many more bundles.
DELAY_SLOTS = 4
GRANULE_BYTES = 32
# Cycles from the end of a transfer's turn on the bus until it is complete: an assumption, not a measurement.
TRANSFER_LATENCY = 700
# Addresses are symbols: each allocation and operand has a range of its own. Code shifts addresses left by 4.
_ALLOCATION_BITS = 17
_OPERAND_BITS = 20
_CORE_INDEX = "#allocation0"
_MOST_BUNDLES = 200_000_000


@dataclass
class Run:
    """What one core did: how often it issued each bundle, and how long it waited for transfers."""

    counts: list[int]
    stall_cycles: float = 0.0
    transferred_bytes: int = 0

    @property
    def cycles(self) -> float:
        return sum(self.counts) + self.stall_cycles


def run(
    program: Program, tables: Mapping[int, Sequence[int]], hbm_bytes_per_cycle: float, cores: int = 1
) -> list[Run]:
    """Runs a kernel on each core of a chip; the tables are the contents of its integer operands, by index.

    Raises:
      ValueError: an operation or operand that is not understood, a table that is missing, or no end in sight.
    """
    machines: list[_Machine] = []
    for core in range(cores):
        machine = _Machine(program, tables, hbm_bytes_per_cycle, core)
        if machines:  # the first core fetches the tables for both
            machine.memory.update(machines[0].fetched)
        machine.run()
        machines.append(machine)
    return [machine.result for machine in machines]


@dataclass
class _Transfers:
    """A bus that serves one transfer after the other, and the flags that say what has arrived."""

    bytes_per_cycle: float
    free_at: float = 0.0
    arrivals: dict[int, deque] = field(default_factory=lambda: defaultdict(deque))

    def start(self, now, granules, flag, through_hbm):
        self.free_at = max(now, self.free_at)
        if through_hbm:
            self.free_at += granules * GRANULE_BYTES / self.bytes_per_cycle
        self.arrivals[flag].append([self.free_at + TRANSFER_LATENCY, granules])

    def wait(self, now, granules, flag):
        """The time when so much has arrived."""
        queue = self.arrivals[flag]
        while granules > 0 and queue:
            arrival, left = queue[0]
            now = max(now, arrival)
            queue[0][1] = left - granules
            granules -= left
            if granules >= 0:
                queue.popleft()
        return now


class _Machine:
    def __init__(self, program, tables, hbm_bytes_per_cycle, core):
        self.registers = defaultdict(int)
        self.memory = defaultdict(int)  # scalar memory, in words
        self.fetched = {}  # the part of it that came from tables
        self.now = 0.0
        self.branch = None
        self.transfers = _Transfers(hbm_bytes_per_cycle)
        self.result = Run([0] * len(program.bundles))
        self._tables = tables
        self._allocations = {}
        self._regions = program.regions
        self._steps = [
            [step for step in map(self._step, bundle.scalar) if step] for bundle in program.bundles
        ]
        self.memory[self._allocation(_CORE_INDEX)] = core

    def run(self):
        counts, steps, end = self.result.counts, self._steps, len(self._steps)
        at, jump, left = 0, None, _MOST_BUNDLES
        while at < end:
            counts[at] += 1
            if steps[at]:
                # All operations of a bundle read before any of them writes.
                for write in [step() for step in steps[at]]:
                    if write:
                        write()
            self.now += 1
            at += 1
            if jump is not None and at == jump[0]:
                at, jump = jump[1], None
            if self.branch is not None:
                if jump is not None:
                    raise ValueError(f"bundle {at - 1:#x} branches where another branch is still to come")
                jump, self.branch = (at + DELAY_SLOTS, self.branch), None
            left -= 1
            if left == 0:
                raise ValueError(f"no end after {_MOST_BUNDLES} bundles")

    def _step(self, operation: Operation) -> Callable | None:
        """A function that reads the operands and returns one that writes the result; None for what does nothing."""
        name = operation.name.split(".")[0]
        if name in ("sphi", "int_to_ptr") and {register(x) for x in operation.operands} == {operation.target}:
            return None  # another name of the same register
        if name in ("sfence", "shalt"):
            return None
        action = self._action(operation)
        if operation.predicate is None:
            return action
        holds = self._operand(operation.predicate)
        return lambda: action() if holds() else None

    def _action(self, operation):
        name, operands = operation.name, operation.operands
        if name == "operand.value":
            return self._writer(operation, lambda: self._table(int(operands[1]))[0])
        if name == "operand.address":
            address = _operand_address(*operands)
            return self._writer(operation, lambda: address)
        if name == "spop":
            return self._writer(operation, lambda: 0)
        if name == "sbr.rel":
            return self._brancher(operands[0])
        values = [self._operand(x) for x in operands]
        if name == "dma.done.wait" or re.fullmatch(r"dma\.\w+_to_\w+", name):
            return self._transfer(name, values)
        if name == "sst":
            address, value = values

            def store():
                at, x = address(), value()
                return lambda: self.memory.__setitem__(at, x)

            return store
        if name == "sld":
            return self._writer(operation, lambda: self.memory[values[0]()])
        function = _function(operation)
        return self._writer(operation, lambda: function(*(value() for value in values)))

    def _writer(self, operation, compute):
        target = operation.target
        if target is None:
            raise ValueError(f"no register to write in {operation}")

        def step():
            value = compute()
            return lambda: self.registers.__setitem__(target, value)

        return step

    def _brancher(self, text):
        match = re.fullmatch(r"target = \$region(\d+)|target bundleno = (\d+).*", text)
        if not match:
            raise ValueError(f"unknown target of a branch: {text!r}")
        target = self._regions[int(match[1])] if match[1] else int(match[2])

        def step():
            def write():
                self.branch = target

            return write

        return step

    def _transfer(self, name, values):
        if name == "dma.done.wait":
            flag, granules = values

            def wait():
                done = self.transfers.wait(self.now, granules(), flag())
                self.result.stall_cycles += done - self.now
                self.now = done

            return wait

        source, granules, destination, flag = values[:4]

        def start():
            amount = granules()
            self.result.transferred_bytes += amount * GRANULE_BYTES
            self.transfers.start(self.now, amount, flag(), "hbm" in name)
            if name.endswith("to_smem"):
                words = self._table(_operand_index(source()))
                self.fetched.update(enumerate(words, destination()))
                self.memory.update(self.fetched)

        return start

    def _table(self, index):
        if index not in self._tables:
            raise ValueError(f"scalar operand {index} of the kernel is not a constant of the program")
        return self._tables[index]

    def _operand(self, text) -> Callable:
        """A function that reads an operand: a register, a number, an address, or a sum of such in brackets."""
        negated = text.startswith("!")
        text = text.lstrip("!$").strip()
        name = register(text)
        if name:
            registers = self.registers
            return (lambda: int(not registers[name])) if negated else (lambda: registers[name])
        if text.startswith("["):
            inner = re.sub(r"^\[(?:\w+:)?\[?|\]?\]$", "", text)
            parts = [self._operand(part) for part in inner.split(" + ")]
            return lambda: sum(part() for part in parts)
        if text.startswith("#"):
            constant = self._allocation(text)
        else:
            constant = _number(text)
        return lambda: constant

    def _allocation(self, name):
        return self._allocations.setdefault(name, (len(self._allocations) + 1) << _ALLOCATION_BITS)


def _number(text):
    if text in ("true", "false"):
        return int(text == "true")
    try:
        return _signed(int(text, 0))
    except ValueError:
        return float(text)


def _operand_address(kind, index):
    return (2 * int(index) + (kind == "output") + 1) << _OPERAND_BITS


def _operand_index(address):
    number = address >> _OPERAND_BITS
    if number % 2 == 0:  # an input's number is odd; its address has been shifted
        number >>= 4
    return number // 2


def _signed(x):
    return (x + 2**31) % 2**32 - 2**31


def _unsigned(x):
    return x % 2**32


_INTEGER = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda x, n: x << (n & 31),
    "sshrl": lambda x, n: _unsigned(x) >> (n & 31),
    "sshra": lambda x, n: x >> (n & 31),
    "scalar_lea": operator.add,
}
_OTHER: dict[str, Callable] = {
    "int_to_ptr": lambda x: x,
    "smov": lambda x: x,
    "pmov": lambda x: x,
    "pneg": lambda x: int(not x),
    "por": lambda x, y: int(bool(x or y)),
    "pand": lambda x, y: int(bool(x and y)),
    "pxor": lambda x, y: int(bool(x) != bool(y)),
    "pnand": lambda x, y: int(not (x and y)),
    "pnor": lambda x, y: int(not (x or y)),
    "smin": min,
    "smax": max,
    "scalar_select": lambda condition, x, y: x if condition else y,
}


def _function(operation) -> Callable:
    base, *suffix = operation.name.split(".")
    if base in _OTHER:
        return _OTHER[base]
    if base == "scmp":
        compare = getattr(operator, suffix[0])
        if suffix[1].startswith("u"):
            return lambda x, y: int(compare(_unsigned(x), _unsigned(y)))
        return lambda x, y: int(compare(x, y))
    if base in _INTEGER:
        function = _INTEGER[base]
        if suffix and suffix[0].startswith("f"):
            return function
        return lambda x, y: _signed(function(x, y))
    raise ValueError(f"unknown operation of the scalar unit: {operation}")
