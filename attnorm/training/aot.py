"""Compiles a config's train step and evaluation for a TPU topology that is not there, and says what they take."""

import time
from collections.abc import Mapping
from typing import Any

import jax

from attnorm.hlo import traffic
from attnorm.topology import tpu_devices
from attnorm.training.config import ConfigError
from attnorm.training.feed import abstract_batch
from attnorm.training.loop import parse_config, require_whole_parts
from attnorm.training.setup import Setup
from attnorm.training.throughput import PEAK_FLOPS

# Of one chip, which is one JAX device: bytes of HBM, and bytes per second that it can send to its neighbours, half of
# the "Bidirectional inter-chip interconnect (ICI) bandwidth". Source: docs.cloud.google.com/tpu/docs/v5e, v5p, v6e.
_HBM = {"TPU v5 lite": 16 * 2**30, "TPU v5": 95 * 2**30, "TPU v6 lite": 32 * 2**30}
_SENT_PER_SECOND = {"TPU v5 lite": 200e9, "TPU v5": 600e9, "TPU v6 lite": 400e9}


class DoesNotFitError(RuntimeError):
    """The train step or the evaluation needs more memory than a device has."""


def compile_ahead(config: Mapping[str, Any], topology: str) -> str:
    """A report of the train step of the longest stage and the evaluation, for a topology such as ``v5e:4x4``.

    Raises:
      ConfigError: a config that cannot be run on so many devices.
      LibtpuMissing, UnknownTopology: no compiler, or no such topology.
      DoesNotFitError: too little memory; with what XLA says of it.
    """
    devices = tpu_devices(topology)
    setup = Setup(*parse_config(config), devices)
    require_whole_parts(setup)
    stage = max(setup.task.stages, key=lambda stage: stage.length)
    kind, num_devices = devices[0].device_kind, len(devices)
    start = time.monotonic()
    state, batch = setup.abstract_state(), abstract_batch(setup.task, stage, setup.mesh)
    compiled = _compiled("the train step", setup.train_step(stage).lower(state, batch))
    seconds = time.monotonic() - start
    lines = [
        f"{topology}: {num_devices} x {kind}, mesh {dict(setup.mesh.shape)}; length {stage.length}; compiled in "
        f"{seconds:.0f} s",
    ]
    _add_memory("memory per device", compiled, kind, lines)
    try:
        evaluation = _compiled("the evaluation", setup.evaluate().lower(state))
    except ConfigError as error:
        # The texts do for the train step, but hold too little to be evaluated on.
        lines.append(f"the evaluation was not compiled: {error}")
    else:
        _add_memory("in evaluation", evaluation, kind, lines)
    flops = len(setup.members) * setup.task.flops_per_step(stage)
    lines.append(f"FLOPs per step: {flops:.4g}, {flops / num_devices:.4g} per device, without recomputation")
    hlo = compiled.as_text()
    assert hlo is not None  # compilers for TPUs give it
    sent = traffic(hlo)
    lines.append("collectives per step and device:" + ("" if sent else " none"))
    lines += [f"  {name}: {of.count}, {_gib(of.bytes_sent)} sent" for name, of in sent.items()]
    if kind in PEAK_FLOPS and kind in _SENT_PER_SECOND:
        computing = flops / num_devices / PEAK_FLOPS[kind]
        sending = sum(of.bytes_sent for of in sent.values()) / _SENT_PER_SECOND[kind]
        lines.append(
            f"at the device's peaks {computing:.3g} s of computation beside {sending:.3g} s of communication per "
            f"step: MFU at most {100 * computing / max(computing, sending):.0f} %"
        )
    return "\n".join(lines)


def _compiled(name: str, lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFitError(f"too little memory for {name} of this config: {error}") from error


def _add_memory(name: str, compiled: jax.stages.Compiled, kind: str, lines: list[str]) -> None:
    """Adds a line on the memory that a program takes of a device; an error with all lines where that is too much."""
    memory = compiled.memory_analysis()
    assert memory is not None  # compilers for TPUs give it
    resident = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    in_use = resident + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    lines.append(
        f"{name}: {_gib(in_use)}{_share(in_use, _HBM.get(kind))}: {_gib(resident)} of state and batch, "
        f"{_gib(memory.temp_size_in_bytes)} of temporaries, {_gib(memory.generated_code_size_in_bytes)} of code"
    )
    if in_use > _HBM.get(kind, in_use):
        raise DoesNotFitError("\n".join([*lines, "this does not fit"]))


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _share(size: float, available: float | None) -> str:
    return f" of {_gib(available)}" if available else ""
