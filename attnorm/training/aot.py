"""Compiles a config's train step for a TPU topology that is not there, and says what a step would take."""

import time
from collections.abc import Mapping
from typing import Any

import jax

from attnorm.topology import tpu_devices
from attnorm.training.collectives import traffic
from attnorm.training.feed import abstract_batch
from attnorm.training.loop import parse_config
from attnorm.training.setup import Setup
from attnorm.training.throughput import PEAK_FLOPS

# Of one chip, which is one JAX device: bytes of HBM, and bytes per second that it can send to its neighbours, half of
# the "Bidirectional inter-chip interconnect (ICI) bandwidth". Source: docs.cloud.google.com/tpu/docs/v5e, v5p, v6e.
_HBM = {"TPU v5 lite": 16 * 2**30, "TPU v5": 95 * 2**30, "TPU v6 lite": 32 * 2**30}
_SENT_PER_SECOND = {"TPU v5 lite": 200e9, "TPU v5": 600e9, "TPU v6 lite": 400e9}


class DoesNotFitError(RuntimeError):
    """The train step needs more memory than a device has."""


def compile_ahead(config: Mapping[str, Any], topology: str) -> str:
    """A report of the train step of the longest stage, compiled for a topology such as ``v5e:4x4``.

    Raises:
      ConfigError: a config that cannot be run on so many devices.
      LibtpuMissing, UnknownTopology: no compiler, or no such topology.
      DoesNotFitError: too little memory; with what XLA says of it.
    """
    devices = tpu_devices(topology)
    setup = Setup(*parse_config(config), devices)
    stage = max(setup.task.stages, key=lambda stage: stage.length)
    kind, num_devices = devices[0].device_kind, len(devices)
    start = time.monotonic()
    batch = abstract_batch(setup.task, stage, setup.mesh)
    lowered = setup.train_step(stage).lower(setup.abstract_state(), batch)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise DoesNotFitError(f"too little memory for this config: {error}") from error
    seconds = time.monotonic() - start
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and hlo is not None  # compilers for TPUs give both
    resident = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    in_use = resident + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    lines = [
        f"{topology}: {num_devices} x {kind}, mesh {dict(setup.mesh.shape)}; length {stage.length}; compiled in "
        f"{seconds:.0f} s",
        f"memory per device: {_gib(in_use)}{_share(in_use, _HBM.get(kind))}: {_gib(resident)} of state and batch, "
        f"{_gib(memory.temp_size_in_bytes)} of temporaries, {_gib(memory.generated_code_size_in_bytes)} of code",
    ]
    if in_use > _HBM.get(kind, in_use):
        raise DoesNotFitError("\n".join([*lines, "this does not fit"]))
    flops = len(setup.members) * setup.task.flops_per_step(stage)
    lines.append(f"FLOPs per step: {flops:.4g}, {flops / num_devices:.4g} per device, without recomputation")
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


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _share(size: float, available: float | None) -> str:
    return f" of {_gib(available)}" if available else ""
