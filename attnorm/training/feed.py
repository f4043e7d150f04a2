"""Batches from the host: this process's rows, read ahead, become arrays over the mesh of all processes."""

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from attnorm.data.pipeline import iterate
from attnorm.training.config import ConfigError
from attnorm.training.mesh import batch_axes
from attnorm.training.task import Stage, Task, Tree


class Feed:
    """`next` is the batch of the next update, None where the task makes it on the device.

    Args:
      first_step: of the updates that are asked for; 0 is the first of the run.
    """

    def __init__(self, task: Task, stage: Stage, first_step: int, mesh: Mesh):
        self._batches = None
        if task.host_batches(stage, 0, 1) is None:
            return
        self._rows = batch_rows(task, stage)
        self._sharding = _over_rows(self._rows, mesh)
        index, count = process_part(self._rows, mesh)
        self._batches = iterate(task.host_batches(stage, index, count), first_step)

    def next(self) -> Tree | None:
        if self._batches is None:
            return None
        part = next(self._batches)
        whole = jax.tree.map(lambda x: (self._rows, *x.shape[1:]), part)
        return jax.make_array_from_process_local_data(self._sharding, part, whole)


def batch_rows(task: Task, stage: Stage) -> int:
    """Rows of a batch of all processes."""
    batches = task.host_batches(stage, 0, 1)
    if batches is None:
        batch = jax.eval_shape(lambda: task.batch(jax.random.key(0), stage))
    else:
        batch = batches[stage.first_step]
    return jax.tree.leaves(batch)[0].shape[0]


def eval_batch_rows(task: Task) -> list[int]:
    """The different numbers of rows that the arrays of an evaluation batch have."""
    batch = jax.eval_shape(lambda: task.eval_batch(jax.random.key(0), jnp.int32(0)))
    return sorted({x.shape[0] for x in jax.tree.leaves(batch)})


def abstract_batch(task: Task, stage: Stage, mesh: Mesh) -> Tree | None:
    """Shapes, types and shardings of what `Feed.next` returns."""
    batches = task.host_batches(stage, 0, 1)
    if batches is None:
        return None
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=_over_rows(x.shape[0], mesh)),
        batches[stage.first_step],
    )


def process_part(rows: int, mesh: Mesh) -> tuple[int, int]:
    """Which part of the rows this process holds, and of how many; processes along other axes hold the same part.

    Raises:
      ConfigError: the mesh splits processes so that their rows overlap without being the same.
    """
    starts: dict[int, set[int]] = {}
    for device, (index,) in _over_rows(rows, mesh).devices_indices_map((rows,)).items():
        # jaxlib, which defines devices, comes without types.
        starts.setdefault(device.process_index, set()).add(index.start or 0)  # type: ignore[attr-defined]
    parts = sorted({tuple(sorted(own)) for own in starts.values()})
    if sum(map(len, parts)) != len(set().union(*parts)):
        raise ConfigError(
            f"config.mesh {dict(mesh.shape)} splits the rows of a batch unevenly among processes"
        )
    return parts.index(tuple(sorted(starts[jax.process_index()]))), len(parts)


def _over_rows(rows: int, mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(batch_axes(rows, mesh) or None))
