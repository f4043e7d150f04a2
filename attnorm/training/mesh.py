"""Processes and devices: joining a cluster, and the mesh over which arrays are split."""

import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from attnorm._compat import is_gce_tpu
from attnorm.training.config import ConfigError, MeshConfig

# From the axis whose devices talk least to the one whose devices talk most, and so are neighbours.
AXES = ("data", "fsdp", "context", "tensor")

# What detect_cluster answers where no variable says it, and the variable that keeps it from being asked.
_METADATA, _SKIPS_METADATA = "the metadata server of this TPU VM", "TPU_SKIP_MDS_QUERY"


class ClusterError(RuntimeError):
    """The processes of a cluster did not find each other, or lost one of them."""


def detect_cluster(environment: Mapping[str, str] | None = None) -> str | None:
    """What says that this is one of several processes: an environment variable, a TPU VM's metadata server, or None.

    That server is asked by default only, of this process and its own environment. What is said of TPUs means nothing
    to a process that JAX_PLATFORMS keeps from them: on a worker of a pod, JAX_PLATFORMS=cpu runs alone.

    >>> from attnorm.training.mesh import detect_cluster
    >>> detect_cluster({"SLURM_STEP_NUM_TASKS": "1"})
    >>> detect_cluster({"TPU_WORKER_HOSTNAMES": "host-0,host-1"})
    'TPU_WORKER_HOSTNAMES'
    """
    is_own = environment is None
    if environment is None:
        environment = os.environ
    if environment.get("JAX_COORDINATOR_ADDRESS"):
        return "JAX_COORDINATOR_ADDRESS"
    for variable in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"):
        if int(environment.get(variable) or 1) > 1:
            return variable
    if "tpu" not in (environment.get("JAX_PLATFORMS") or "tpu").split(","):
        return None
    if environment.get("TPU_PROCESS_ADDRESSES_PATH"):
        return "TPU_PROCESS_ADDRESSES_PATH"
    for variable in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        if "," in environment.get(variable, ""):
            return variable
    if int(environment.get("MEGASCALE_NUM_SLICES") or 1) > 1:
        return "MEGASCALE_NUM_SLICES"
    return _METADATA if is_own and is_gce_tpu() else None


def initialize_distributed(timeout_seconds: int = 300) -> None:
    """Joins the other processes where there is a cluster. To be called before any use of a device.

    Slurm, Open MPI and Cloud TPU need nothing else; elsewhere JAX_COORDINATOR_ADDRESS (host:port),
    JAX_NUM_PROCESSES and JAX_PROCESS_ID say who is who.

    Raises:
      ClusterError: the cluster did not come up within the timeout.
    """
    found = detect_cluster()
    if found is None:
        return
    numbers: dict[str, Any] = {
        argument: int(os.environ[name])
        for argument, name in (("num_processes", "JAX_NUM_PROCESSES"), ("process_id", "JAX_PROCESS_ID"))
        if name in os.environ
    }
    try:
        jax.distributed.initialize(initialization_timeout=timeout_seconds, **numbers)
    except (RuntimeError, ValueError) as error:
        if found in os.environ:
            found, alone = f"{found}={os.environ[found]!r}", f"unset {found}"
        else:
            alone = f"set {_SKIPS_METADATA}=1"
        raise ClusterError(
            f"{found} says that this process belongs to a cluster, but joining it failed (timeout "
            f"{timeout_seconds} s): {error}. Check that every process was started and can reach the coordinator; "
            f"{alone} to train on this machine alone."
        ) from error


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh of :data:`AXES` over all devices of all processes, or over those given.

    Raises:
      ConfigError: sizes that do not make up the number of devices.

    >>> from attnorm.training.config import MeshConfig
    >>> from attnorm.training.mesh import make_mesh
    >>> make_mesh(MeshConfig(data=-1, fsdp=1, context=1, tensor=1)).axis_names
    ('data', 'fsdp', 'context', 'tensor')
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, axis) for axis in AXES]
    others = math.prod(size for size in sizes if size != -1)
    sizes = [len(devices) // others if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        given = " x ".join(f"{axis}={getattr(config, axis)}" for axis in AXES)
        raise ConfigError(f"config.mesh must make up the {len(devices)} devices, got {given}")
    # A torus of 4 x 4 chips serves an axis of 8 and one of 2 as well, if not as fast.
    placed = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(placed, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def batch_axes(rows: int, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes that split a batch of so many rows; none, so that every device has all, if they do not divide it.

    A curriculum with a fixed number of tokens can end in batches of fewer rows than devices; these must run too.
    """
    return ("data", "fsdp") if rows % (mesh.shape["data"] * mesh.shape["fsdp"]) == 0 else ()


def split_batch(batch: Any, mesh: Mesh) -> Any:
    """The batch inside a jitted function: rows split over `data` and `fsdp`, length over `context`.

    What an axis does not divide is not split over it.
    """

    def split(x):
        context = "context" if x.ndim > 1 and x.shape[1] % mesh.shape["context"] == 0 else None
        spec = PartitionSpec(batch_axes(x.shape[0], mesh) or None, *([context] if x.ndim > 1 else []))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    return jax.tree.map(split, batch)


def over(mesh: Mesh) -> Callable[[Callable], Callable]:
    """Decorates a function so that models and kernels find the mesh in context while it is traced."""

    def decorate(function):
        @functools.wraps(function)
        def wrapped(*args):
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                return function(*args)

        return wrapped

    return decorate
