"""Batches by step: which rows a step sees depends on the seed and the step alone."""

from collections.abc import Iterator

import grain

from attnorm.data.packing import PackedRows, Row


def batches(
    rows: PackedRows, batch_size: int, *, seed: int, process_index: int = 0, process_count: int = 1
) -> grain.MapDataset:
    """The batches of one process: ``batches(...)[step]`` is that of a step, however large.

    Every epoch has all rows once, in an order of its own. Together the processes see at each step what one process
    alone would see, so the number of processes changes nothing but who reads what.

    Args:
      rows: of all processes.
      batch_size: of all processes together.
      seed: of the orders.
      process_index, process_count: this process, and how many there are.

    Raises:
      ValueError: a batch size that the processes cannot share equally, or a process that is not among them.

    >>> import numpy as np
    >>> from attnorm.data.packing import PackedRows
    >>> from attnorm.data.pipeline import batches
    >>> rows = PackedRows(np.array([0, 1, 2, 3, 4, 5]), 2, end_of_document=0)
    >>> batches(rows, 2, seed=0)[7]["inputs"].shape
    (2, 2)
    """
    if process_count < 1 or not 0 <= process_index < process_count:
        raise ValueError(f"process_index must be in 0..{process_count - 1}, got {process_index}")
    if batch_size < 1 or batch_size % process_count:
        raise ValueError(f"batch_size must be a multiple of {process_count} processes, got {batch_size}")
    endless = grain.MapDataset.source(rows).seed(seed).shuffle().repeat()
    return endless[process_index::process_count].batch(batch_size // process_count)


def iterate(dataset: grain.MapDataset, first_step: int, num_threads: int = 4) -> Iterator[Row]:
    """The batches from a step on, the next ones read ahead in threads.

    >>> import numpy as np
    >>> from attnorm.data.packing import PackedRows
    >>> from attnorm.data.pipeline import batches, iterate
    >>> dataset = batches(PackedRows(np.array([0, 1, 2, 3, 4, 5]), 2, end_of_document=0), 2, seed=0)
    >>> bool(np.all(next(iterate(dataset, first_step=7))["inputs"] == dataset[7]["inputs"]))
    True
    """
    options = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=4 * num_threads)
    iterator = iter(dataset.to_iter_dataset(options))
    iterator.set_state({"next_index": first_step})
    return iterator
