"""Every notebook runs from top to bottom and ends in an assertion."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ABOUT_YOUR_OWN_CODE = ("05_attnorm_in_your_flax_model", "06_write_your_own_normalizer")


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs(path):
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": FOLDER}}
    ).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_ends_in_an_assertion_and_defines_nothing_reusable(path):
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert "assert " in cells[-1].source
    if path.stem not in ABOUT_YOUR_OWN_CODE:
        assert not any("class " in cell.source for cell in cells)
