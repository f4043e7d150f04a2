"""Cell files: what is written is read, and what was changed since is not."""

import pytest

from attnorm.lengthbench.store import DamagedCell, cell_path, read_cell, write_cell

CELL = {"task": "copy", "rows": [{"seed": 0, "loss": 0.1 + 0.2, "exact": None}]}


def test_a_cell_is_read_as_it_was_written(tmp_path):
    path = cell_path(tmp_path, "copy", "lp(p=4)")
    assert read_cell(path) is None
    write_cell(path, CELL)
    assert read_cell(path) == CELL
    assert [file.name for file in path.parent.iterdir()] == ["lp(p=4).json"]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[: len(text) // 2],
        lambda text: text.replace("0.3", "0.4"),
        lambda text: text.replace('"checksum"', '"sum"'),
        lambda text: "[]",
        lambda text: "\udcff",
    ],
    ids=["cut off", "a digit", "a key", "another value", "no text"],
)
def test_a_damaged_cell_is_told_from_a_missing_one(tmp_path, change):
    path = tmp_path / "cell.json"
    write_cell(path, CELL)
    changed = change(path.read_text())
    path.write_bytes(changed.encode("utf-8", "surrogateescape"))
    with pytest.raises(DamagedCell, match="cell.json"):
        read_cell(path)
