"""The integer constants that a compiled program hands to its TPU kernels, as words of scalar memory."""

from __future__ import annotations

import re

import numpy as np

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_DTYPES = {"s8": "i1", "u8": "u1", "pred": "u1", "s16": "<i2", "u16": "<u2", "s32": "<i4", "u32": "<u4"}
_PASSED_ON = {"copy", "copy-start", "copy-done", "bitcast", "reshape", "optimization-barrier"}


def kernel_tables(hlo: str) -> dict[str, dict[int, list[int]]]:
    """For each Mosaic kernel of an HLO text with large constants: operand index -> 32-bit words."""
    instructions = {}
    for line in hlo.splitlines():
        match = _INSTRUCTION.match(line)
        if match:
            instructions[match[1]] = match.groups()[1:]

    def constant(name):
        _, operation, rest = instructions.get(name, (None, None, ""))
        if operation == "constant":
            return [int(x) for x in re.findall(r"-?\d+", _numbers(rest))]
        if operation in _PASSED_ON:
            operand = re.search(r"%([\w.\-]+)", rest)
            return constant(operand[1]) if operand else None
        return None

    tables: dict[str, dict[int, list[int]]] = {}
    for name, (_, operation, rest) in instructions.items():
        if operation == "custom-call" and '"tpu_custom_call"' in rest:
            operands = re.findall(r"%([\w.\-]+)", rest.split("), custom_call_target")[0])
            tables[name] = {}
            for index, operand in enumerate(operands):
                kind = _ARRAY.match(instructions[operand][0]) if operand in instructions else None
                if kind and kind[1] in _DTYPES and (values := constant(operand)) is not None:
                    tables[name][index] = words(values, *kind.groups())
    return tables


def words(values: list[int], dtype: str, shape: str, order: str | None, tiling: str | None) -> list[int]:
    """Values in row-major order, laid out in memory as HLO says, e.g. ``s8[8,16]{1,0:T(8,128)(4,1)}``.

    >>> words([1, 2, 3, 4], "s8", "4", "0", None) == [0x04030201]
    True
    """
    sizes = [int(n) for n in shape.split(",") if n]
    array = np.array(values).astype(_DTYPES[dtype]).reshape(sizes)
    array = array.transpose([int(axis) for axis in (order or "").split(",") if axis][::-1])
    for tile in re.findall(r"\(([\d,]+)\)", re.split(r"[A-Z]\(", (tiling or "").removeprefix("T"))[0]):
        array = _in_tiles(array, [int(n) for n in tile.split(",")])
    data = array.tobytes()
    return np.frombuffer(data + bytes(-len(data) % 4), "<i4").tolist()


def _in_tiles(array, tile):
    """The last dimensions n become (number of tiles, tile), the tiles' own positions last; padded with zeros."""
    array = array.reshape((1,) * (len(tile) - array.ndim) + array.shape)
    kept = array.ndim - len(tile)
    array = np.pad(
        array, [(0, 0)] * kept + [(0, -n % t) for n, t in zip(array.shape[kept:], tile, strict=True)]
    )
    split = [size for n, t in zip(array.shape[kept:], tile, strict=True) for size in (n // t, t)]
    array = array.reshape(*array.shape[:kept], *split)
    axes = range(kept, array.ndim)
    return array.transpose([*range(kept), *axes[::2], *axes[1::2]])


def _numbers(text):
    """The part of ``{1, 2}), backend_config=..`` that is the constant, booleans as digits."""
    return text.split(")")[0].replace("true", "1").replace("false", "0")
