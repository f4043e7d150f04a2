"""Packing loses no token and mixes no documents; batches depend on seed and step alone."""

import numpy as np
import pytest

from attnorm.data.packing import PackedRows, join
from attnorm.data.pipeline import batches, iterate

END = 99


def documents(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 90, n).astype(np.int32) for n in lengths]


@pytest.mark.parametrize("lengths", [[1], [7], [8], [3, 4], [1, 1, 1, 20, 2], [15, 1, 9, 30, 8, 7, 40]])
@pytest.mark.parametrize("length", [1, 8, 100])
def test_every_token_is_predicted_once_from_its_own_document(lengths, length):
    docs = documents(lengths)
    rows = PackedRows(join(docs, END), length, END)
    packed = [rows[i] for i in range(len(rows))]
    assert all(x.shape == (length,) and x.dtype == np.int32 for row in packed for x in row.values())
    filled = [row["segment_ids"] > 0 for row in packed]
    assert all(mask.all() for mask in filled[:-1])

    predicted = np.concatenate([row["targets"][mask] for row, mask in zip(packed, filled, strict=True)])
    np.testing.assert_array_equal(predicted, np.concatenate([[*doc, END] for doc in docs]))
    given = np.concatenate([row["inputs"][mask] for row, mask in zip(packed, filled, strict=True)])
    np.testing.assert_array_equal(given, np.concatenate([[END, *doc] for doc in docs]))

    # Within a segment of a row: one document, in order, without a gap.
    owner = np.concatenate([np.full(len(doc) + 1, i) for i, doc in enumerate(docs)])
    place = np.concatenate([np.arange(len(doc) + 1) for doc in docs])
    for r, (row, mask) in enumerate(zip(packed, filled, strict=True)):
        at = slice(r * length, r * length + mask.sum())
        segments = row["segment_ids"][mask]
        np.testing.assert_array_equal(np.diff(segments), np.diff(owner[at]))
        assert segments[0] == 1
        for segment in set(segments.tolist()):
            inside = segments == segment
            places = place[at][inside]
            np.testing.assert_array_equal(row["positions"][mask][inside], places - places[0])
        for name in ("inputs", "targets", "positions"):
            assert not row[name][~mask].any()


def test_documents_and_rows_that_cannot_be():
    for docs, message in [
        ([], "at least one"),
        ([np.array([1]), np.array([], np.int32)], r"documents\[1\] has no tokens"),
        ([np.array([1, END])], r"documents\[0\] holds the end-of-document id 99"),
    ]:
        with pytest.raises(ValueError, match=message):
            join(docs, END)
    stream = join(documents([3]), END)
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        PackedRows(stream, 0, END)
    with pytest.raises(ValueError, match="must start with the end-of-document id 99"):
        PackedRows(stream[1:], 2, END)
    with pytest.raises(IndexError, match="row 2 of 2"):
        PackedRows(stream, 2, END)[2]


def rows_of(*steps):
    """Which rows the steps hold, by their first input, which is different in all rows."""
    return [int(x) for step in steps for x in step["inputs"][:, 0]]


@pytest.fixture
def rows():
    return PackedRows(join([np.arange(1, 48, dtype=np.int32)], 0), 4, 0)  # 12 rows


def test_each_epoch_has_every_row_once(rows):
    dataset = batches(rows, 3, seed=5)
    epochs = [rows_of(*(dataset[step] for step in range(4 * e, 4 * e + 4))) for e in range(3)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(0, 48, 4))
    assert epochs[0] != epochs[1] != epochs[2]
    assert epochs[0] != sorted(epochs[0])
    assert rows_of(*(batches(rows, 3, seed=6)[step] for step in range(4))) != epochs[0]


def test_a_batch_that_spans_two_epochs_loses_nothing(rows):
    dataset = batches(rows, 5, seed=5)
    seen = rows_of(*(dataset[step] for step in range(12)))  # five epochs
    assert sorted(seen) == sorted(5 * list(range(0, 48, 4)))


def test_processes_share_the_batches_of_one(rows):
    alone = batches(rows, 6, seed=1)
    shared = [batches(rows, 6, seed=1, process_index=i, process_count=3) for i in range(3)]
    for step in (0, 1, 2, 17):
        parts = [rows_of(dataset[step]) for dataset in shared]
        assert all(len(part) == 2 for part in parts)
        assert sorted(sum(parts, [])) == sorted(rows_of(alone[step]))


def test_reading_goes_on_at_any_step(rows):
    dataset = batches(rows, 3, seed=2)
    iterator = iterate(dataset, first_step=5)
    for step in (5, 6, 7):
        np.testing.assert_array_equal(next(iterator)["targets"], dataset[step]["targets"])


def test_processes_that_cannot_be(rows):
    with pytest.raises(ValueError, match="batch_size must be a multiple of 3 processes, got 4"):
        batches(rows, 4, seed=0, process_count=3)
    with pytest.raises(ValueError, match=r"process_index must be in 0..2, got 3"):
        batches(rows, 3, seed=0, process_index=3, process_count=3)
