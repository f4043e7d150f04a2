"""Compiles kernels for a TPU that is not there, and reads what libtpu says it made of them."""

from __future__ import annotations

import atexit
import functools
import glob
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxlib._hlo import HloPrintOptions

from attnorm import topology as described
from attnorm.bench.hlo_tables import kernel_tables

_DUMP_FLAGS = (
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=.*final.*",
)


@dataclass(frozen=True)
class CompiledKernel:
    """A Mosaic kernel: its bundles, the vector memory it allocates, and its tables in scalar memory."""

    name: str
    bundles: str
    vmem_bytes: int
    tables: dict[int, list[int]]


@dataclass(frozen=True)
class CompiledProgram:
    kernels: list[CompiledKernel]
    memory: Any  # of jax.stages.Compiled.memory_analysis


@functools.cache
def require_libtpu() -> Path:
    """Prepares this process to compile with libtpu, before it is loaded; the folder of its dumps.

    Raises:
      LibtpuMissing: with what to do about it.
    """
    folder = tempfile.mkdtemp(prefix="attnorm-bundles-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    described.require_libtpu(" ".join((f"--xla_jf_dump_to={folder}", *_DUMP_FLAGS)))
    return Path(folder)


def one_chip(topology: str) -> Mesh:
    """A mesh of the first chip of a topology such as ``v5e:2x2``.

    Raises:
      UnknownTopology: with what libtpu says.
    """
    require_libtpu()
    return Mesh(np.array(described.tpu_devices(topology)[:1]), ("one",), axis_types=(AxisType.Auto,))


def compile_for(topology: str, function: Callable, arguments: Sequence) -> CompiledProgram:
    """Compiles a function of ``jax.ShapeDtypeStruct``s for one chip of a topology."""
    folder = require_libtpu()
    mesh = one_chip(topology)
    for path in folder.iterdir():
        path.unlink()
    # The kernels choose their blocks for the chip that the mesh names.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        jitted = jax.jit(function, in_shardings=NamedSharding(mesh, PartitionSpec()))
        compiled = jitted.lower(*arguments).compile()

    options = HloPrintOptions()
    options.print_large_constants = True
    options.print_metadata = options.print_backend_config = False
    executable = compiled.runtime_executable()
    assert executable is not None
    (module,) = executable.hlo_modules()
    kernels = [
        CompiledKernel(name, _dump(folder, name, "final_bundles"), _vmem_bytes(folder, name), tables)
        for name, tables in kernel_tables(module.to_string(options)).items()
    ]
    return CompiledProgram(kernels, compiled.memory_analysis())


def _dump(folder, kernel, what):
    pattern = f"*-{glob.escape(kernel)}-[0-9][0-9]-{what}.txt"
    paths = sorted(folder.glob(pattern))
    if len(paths) != 1:
        raise FileNotFoundError(f"libtpu wrote {len(paths)} files {pattern}, 1 expected")
    return paths[0].read_text()


def _vmem_bytes(folder, kernel):
    """The vector memory of windows, scratch and spilled registers (one register of 4 KiB each)."""
    text = _dump(folder, kernel, "pre-finalize-registers-and-allocations")
    sizes = re.findall(r"#allocation\d+ \[.*?space=vmem, size = (0x[0-9a-f]+)", text)
    spills = set(re.findall(r"\[vmem:\[(#allocation\d+_spill)\]", _dump(folder, kernel, "final_bundles")))
    return sum(int(size, 16) for size in sizes) + 4096 * len(spills)
