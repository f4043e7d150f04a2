"""Reads the instruction bundles that libtpu dumps.

A bundle is one line, ``0x1a : > { operation ;; operation }``: what a core issues in one cycle. Comments say where
the regions start that branches name. Registers carry a number of their own before the physical name, as in
``%s54_s20``; only the physical one matters, since copies and phis of the dump stay in place.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_REGION = re.compile(r"Start(?:/End empty)? region (\d+)")
_LINE = re.compile(r"\s*(0x[0-9a-f]+|0)\s[^:{]*:[ >]*\{(.*)")
_OPERATION = re.compile(r"(?:%(\w+) = )?(\S+)\s*(.*)", re.DOTALL)
_PREDICATE = re.compile(r"\((!?%\w+)(?:, %\w+)?\),?")
# What a register points to, behind or before it: %s3 [#allocation8], [resolvable:$true] %s3
_REMARK = re.compile(r"(?<=\w) \[.*\]$|^\[.*\] (?=%)")
_SCALAR_REGISTER = re.compile(r"(?:\w+_)?([sp]\d+)$")


@dataclass(frozen=True)
class Operation:
    """One operation of the scalar unit: ``target = name (predicate) operands``."""

    target: str | None  # a register: s0, s1, .. or p0, p1, ..
    name: str
    predicate: str | None  # p0, or !p0
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Bundle:
    scalar: tuple[Operation, ...]
    matmuls: tuple[str, ...]  # the names of the products that the matrix units start


@dataclass(frozen=True)
class Program:
    bundles: tuple[Bundle, ...]
    regions: dict[int, int]  # where each region starts


def parse(text: str) -> Program:
    """The program of one dump, ``*-final_bundles.txt``.

    Raises:
      ValueError: an address is not the one that follows, so that a bundle was not recognised.
    """
    bundles: list[Bundle] = []
    regions: dict[int, int] = {}
    text = _COMMENT.sub(lambda comment: "".join(f" @{n} " for n in _REGION.findall(comment[0])), text)
    for line in text.splitlines():
        match = _LINE.match(line)
        if not match:
            continue
        address = int(match[1], 16)
        if address != len(bundles):
            raise ValueError(f"bundle {len(bundles):#x} is missing, the next is {address:#x}")
        for region in re.findall(r"@(\d+)", match[2]):
            regions.setdefault(int(region), address)
        body = re.sub(r"@\d+", "", match[2]).strip().removesuffix("}")
        bundles.append(_bundle([part.strip() for part in body.split(";;") if part.strip()]))
    if not bundles:
        raise ValueError("there are no bundles in this text")
    # The last bundle is marked as the exit instead of as the start of its region.
    unplaced = {int(region) for region in re.findall(r"target = \$region(\d+)", text)} - set(regions)
    if len(unplaced) > 1:
        raise ValueError(f"branches go to regions {sorted(unplaced)}, which start nowhere")
    regions |= dict.fromkeys(unplaced, len(bundles) - 1)
    return Program(tuple(bundles), regions)


def register(text: str) -> str | None:
    """The physical scalar or predicate register of ``%s54_s20`` or ``s54_s20``: s20; of other text None."""
    match = _SCALAR_REGISTER.fullmatch(text.lstrip("%"))
    return match[1] if match else None


def _bundle(parts):
    scalar, matmuls = [], []
    for part in parts:
        operation = _OPERATION.match(part)
        assert operation, part
        target, name, rest = operation.groups()
        target = register(target) if target else None
        if name.startswith("vmatmul"):
            matmuls.append(name)
        elif target or not name.startswith("v"):
            scalar.append(_operation(target, name, rest))
    return Bundle(tuple(scalar), tuple(matmuls))


def _operation(target, name, rest):
    if name.startswith("inlined_call_operand"):
        how = "value" if "<no" in name else "address"
        operand = re.search(r"index: (\d+), kind: (\w+)", rest)
        assert operand, rest
        return Operation(target, f"operand.{how}", None, (operand[2], operand[1]))
    rest = re.sub(r"^\[thread:\$\d+\]\s*", "", rest)
    if name == "sst":  # the address and the value, with no comma between
        rest = rest.replace("]] ", "]], ", 1)
    predicate = _PREDICATE.search(rest)
    if predicate:
        rest = rest[: predicate.start()] + rest[predicate.end() :]
    condition = None
    if predicate:
        condition = register(predicate[1].lstrip("!"))
        assert condition, predicate[1]
        if predicate[1].startswith("!"):
            condition = "!" + condition
    return Operation(
        target,
        name,
        condition,
        tuple(_REMARK.sub("", operand) for operand in _split(rest) if operand),
    )


def _split(text):
    """At the commas outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([") - (character in ")]")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
