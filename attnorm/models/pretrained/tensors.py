"""The safetensors format: 8 bytes with the length of a JSON header, the header, the tensors' bytes.

Read by hand because it is this small, and so that a file that is cut off is an error that says so.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
_LARGEST_HEADER = 100_000_000  # bytes, by the format
_GIT_LFS = b"version https://git-lfs"


class TensorFileError(ValueError):
    """A file that is not complete, or not in the format."""


def read_tensors(path: Path) -> Mapping[str, np.ndarray]:
    """The tensors of a .safetensors file by name, mapped into memory rather than read.

    Raises:
      TensorFileError: a file that is cut off, is a Git LFS pointer, has a dtype that is not known here, or is
        something else; the message names it.

    Source: https://github.com/huggingface/safetensors#format
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        start = file.read(len(_GIT_LFS))
        if start == _GIT_LFS:
            raise TensorFileError(f"{path} is a Git LFS pointer, not the weights: run git lfs pull")
        header_size = int.from_bytes(start[:8], "little")
        if size < 8 or header_size > _LARGEST_HEADER:
            raise TensorFileError(f"{path} is not a safetensors file")
        if size < 8 + header_size:
            raise _cut_off(path, size, 8 + header_size)
        file.seek(8)
        text = file.read(header_size)
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        entries = {name: _entry(**entry) for name, entry in header.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TensorFileError(f"{path} is not a safetensors file: its header cannot be read") from error
    wanted = 8 + header_size + max((end for *_, end in entries.values()), default=0)
    if size < wanted:
        raise _cut_off(path, size, wanted)
    data = np.memmap(path, np.uint8, mode="r")[8 + header_size :] if entries else None
    return {name: _tensor(path, name, data, *entry) for name, entry in entries.items()}


def _entry(dtype, shape, data_offsets):
    start, end = data_offsets
    for number in (*shape, start, end):
        if type(number) is not int or number < 0:
            raise ValueError(f"not a size: {number!r}")
    return str(dtype), tuple(shape), start, end


def _tensor(path, name, data, dtype, shape, start, end):
    if dtype not in _DTYPES:
        raise TensorFileError(f"{path}: {name} has dtype {dtype}; known are {', '.join(_DTYPES)}")
    dtype = np.dtype(_DTYPES[dtype])
    if end - start != dtype.itemsize * math.prod(shape):
        raise TensorFileError(f"{path}: {name} of shape {shape} cannot have the bytes {start} to {end}")
    return data[start:end].view(dtype).reshape(shape)


def _cut_off(path, size, wanted):
    return TensorFileError(
        f"{path} is cut off: it has {size:,} of {wanted:,} bytes. Download it again; nothing was read."
    )
