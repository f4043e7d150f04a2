"""Processes and devices: joining a cluster, and a mesh whose `data` axis splits the batch."""

import os
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


class ClusterError(RuntimeError):
    """The processes of a cluster did not find each other."""


def detect_cluster(environment: Mapping[str, str]) -> str | None:
    """The environment variable that says that this is one of several processes, or None.

    >>> from attnorm.training.mesh import detect_cluster
    >>> detect_cluster({"SLURM_STEP_NUM_TASKS": "1"})
    >>> detect_cluster({"TPU_WORKER_HOSTNAMES": "host-0,host-1"})
    'TPU_WORKER_HOSTNAMES'
    """
    if environment.get("JAX_COORDINATOR_ADDRESS"):
        return "JAX_COORDINATOR_ADDRESS"
    if "," in environment.get("TPU_WORKER_HOSTNAMES", ""):
        return "TPU_WORKER_HOSTNAMES"
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "MEGASCALE_NUM_SLICES"):
        if int(environment.get(variable) or 1) > 1:
            return variable
    return None


def initialize_distributed(timeout_seconds: int = 300) -> None:
    """Joins the other processes where the environment names a cluster. To be called before any use of a device.

    Slurm, Open MPI and Cloud TPU need nothing else; elsewhere JAX_COORDINATOR_ADDRESS (host:port),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID say who is who.

    Raises:
      ClusterError: the cluster did not come up within the timeout.
    """
    variable = detect_cluster(os.environ)
    if variable is None:
        return
    numbers = {
        argument: int(os.environ[name])
        for argument, name in (("num_processes", "JAX_NUM_PROCESSES"), ("process_id", "JAX_PROCESS_ID"))
        if name in os.environ
    }
    try:
        jax.distributed.initialize(initialization_timeout=timeout_seconds, **numbers)
    except (RuntimeError, ValueError) as error:
        raise ClusterError(
            f"{variable}={os.environ[variable]!r} says that this process belongs to a cluster, but joining it "
            f"failed (timeout {timeout_seconds} s): {error}. Check that every process was started and can reach "
            f"the coordinator; unset {variable} to train on this machine alone."
        ) from error


def make_mesh() -> Mesh:
    """All devices of all processes on one axis, `data`."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_batch(batch: Any, mesh: Mesh) -> Any:
    """The batch with its leading axis split over the `data` axis, inside a jitted function."""
    return jax.lax.with_sharding_constraint(batch, NamedSharding(mesh, PartitionSpec("data")))
