"""TPUs that are not there, to compile for: libtpu alone is needed."""

from __future__ import annotations

import functools
import importlib.util
import os

import jax
from jax.experimental import topologies

from attnorm.extras import install_hint


class LibtpuMissing(Exception):
    """There is no libtpu here."""


class UnknownTopology(ValueError):
    """libtpu knows no topology of this name."""


@functools.cache
def require_libtpu(init_arguments: str = "") -> None:
    """Prepares this process to compile with libtpu, before it is loaded.

    Raises:
      LibtpuMissing: with what to do about it.
    """
    if not importlib.util.find_spec("libtpu"):
        raise LibtpuMissing(f"needs libtpu, which is not installed; {install_hint('tpu')}")
    # There is no machine to ask, and other processes may have loaded libtpu too.
    os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {init_arguments}"


def tpu_devices(topology: str) -> list[jax.Device]:
    """The devices of a topology such as ``v5e:2x2``, to be compiled for.

    Raises:
      LibtpuMissing: there is none.
      UnknownTopology: with what libtpu says.
    """
    require_libtpu()
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    except jax.errors.JaxRuntimeError as error:
        raise UnknownTopology(str(error)) from error
