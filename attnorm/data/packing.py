"""Documents packed into rows of equal length, with every token predicted exactly once.

All documents stand one after the other in one stream, each behind the end-of-document id:

    E d d d E d d E d d d d        inputs
    d d d E d d E d d d d E        targets: the next of the stream, at its end E

Rows are cut from the stream wherever they end. No token is lost, none is predicted from another document, and only
the last row can be short.
"""

from collections.abc import Iterable
from typing import TypedDict

import numpy as np
from jaxtyping import Int

FEWEST_TOKENS = 2  # of a document: one to be read, and one to be predicted from it


class Row(TypedDict):
    """One row, or with a leading axis a batch of them."""

    inputs: Int[np.ndarray, "*B T"]
    targets: Int[np.ndarray, "*B T"]
    segment_ids: Int[np.ndarray, "*B T"]  # of the document, from 1 in every row; 0 where the row is empty
    positions: Int[np.ndarray, "*B T"]  # in the document, or from where the row cut it


def join(documents: Iterable[Int[np.ndarray, "n"]], end_of_document: int) -> Int[np.ndarray, "S"]:
    """The stream of these documents.

    Raises:
      ValueError: no documents, one without tokens, or one that holds the end-of-document id.

    >>> from attnorm.data.packing import join
    >>> join([np.array([1, 2]), np.array([3])], end_of_document=0)
    array([0, 1, 2, 0, 3], dtype=int32)
    """
    parts = []
    for index, document in enumerate(documents):
        if len(document) == 0:
            raise ValueError(f"documents[{index}] has no tokens")
        if np.any(document == end_of_document):
            raise ValueError(f"documents[{index}] holds the end-of-document id {end_of_document}")
        parts += [np.array([end_of_document], np.int32), document]
    if not parts:
        raise ValueError("documents must hold at least one")
    return np.concatenate(parts, dtype=np.int32)


class PackedRows:
    """The rows of a stream, made when they are asked for.

    Args:
      stream: as :func:`join` makes it.
      length: T, of a row.
      end_of_document: the id.

    Raises:
      ValueError: a stream that does not start with the end-of-document id, or a length below 1.

    >>> from attnorm.data.packing import PackedRows, join
    >>> rows = PackedRows(join([np.array([5, 6, 7]), np.array([8])], end_of_document=0), 4, end_of_document=0)
    >>> len(rows)
    2
    >>> rows[1]["inputs"], rows[1]["targets"], rows[1]["segment_ids"]
    (array([0, 8, 0, 0], dtype=int32), array([8, 0, 0, 0], dtype=int32), array([1, 1, 0, 0], dtype=int32))
    """

    def __init__(self, stream: Int[np.ndarray, "S"], length: int, end_of_document: int):
        if length < 1:
            raise ValueError(f"length must be at least 1, got {length}")
        if len(stream) == 0 or stream[0] != end_of_document:
            raise ValueError(
                f"stream must start with the end-of-document id {end_of_document}, got {list(stream[:1])}"
            )
        self._stream = stream
        self._length = length
        self._end = end_of_document

    def __len__(self) -> int:
        return -(-len(self._stream) // self._length)

    def __getitem__(self, index: int) -> Row:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        start = index * self._length
        # With the token after the row; at the end of the stream that is the end of the last document.
        tokens = np.append(self._stream[start : start + self._length + 1], self._end).astype(np.int32)
        filled = min(self._length, len(self._stream) - start)
        is_start = tokens[:filled] == self._end
        is_start[0] = True
        offsets = np.arange(filled, dtype=np.int32)

        def padded(x):
            return np.pad(x, (0, self._length - filled))

        return Row(
            inputs=padded(tokens[:filled]),
            targets=padded(tokens[1 : filled + 1]),
            segment_ids=padded(np.cumsum(is_start, dtype=np.int32)),
            positions=padded(offsets - np.maximum.accumulate(np.where(is_start, offsets, 0))),
        )
