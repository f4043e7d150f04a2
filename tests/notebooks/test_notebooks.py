"""Every notebook runs from top to bottom and ends in an assertion; its first cell finds or fetches attnorm."""

import builtins
import glob
import importlib.util
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
ABOUT_YOUR_OWN_CODE = ("05_attnorm_in_your_flax_model", "06_write_your_own_normalizer")


def code_cells(path):
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


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
    cells = code_cells(path)
    assert "assert " in cells[-1].source
    if path.stem not in ABOUT_YOUR_OWN_CODE:
        assert not any("class " in cell.source for cell in cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_is_committed_whole_or_without_outputs(path):
    """As it ran from top to bottom, or as it never ran; without warnings, and small."""
    cells = code_cells(path)
    counts = [cell.execution_count for cell in cells]
    assert counts in ([None] * len(cells), list(range(1, len(cells) + 1)))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs) == (counts[0] == 1)
    assert not [
        output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"
    ]
    assert not any("execution" in cell.metadata for cell in cells)
    assert path.stat().st_size < 500_000


@pytest.fixture
def first_cell(tmp_path, monkeypatch):
    """Runs the cell in a folder, on a machine with these devices; what it did to the shell and to sys.path."""
    sources = {code_cells(path)[0].source for path in NOTEBOOKS}
    assert len(sources) == 1, "the first cells differ"
    code = TransformerManager().transform_cell(sources.pop())

    def run(folder, devices=(), installed=True):
        did, namespace = [], {}

        def act(command):
            did.append(command.format(**namespace))

        shell = SimpleNamespace(system=act, run_line_magic=lambda name, line: act(f"%{name} {line}"))
        find_files, find_spec, exists = glob.glob, importlib.util.find_spec, os.path.exists
        with monkeypatch.context() as patch:
            patch.chdir(folder)
            patch.setattr(sys, "path", list(sys.path))
            patch.setattr(
                glob,
                "glob",
                lambda x: [d for d in devices if Path(d).match(x)] if "/dev/" in x else find_files(x),
            )
            patch.setattr(
                os.path, "exists", lambda x: x in devices if str(x).startswith("/dev/") else exists(x)
            )
            patch.setattr(importlib.util, "find_spec", lambda name: find_spec(name) if installed else None)
            patch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
            exec(code, namespace)
            return did, Path(sys.path[0])

    return run


CLONE = "git clone --depth 1 https://github.com/attnorm/attnorm"


def test_the_first_cell_finds_the_checkout(first_cell, tmp_path):
    for folder in (FOLDER, FOLDER.parent):
        assert first_cell(folder) == ([], FOLDER.parent)
    # Where nothing was installed yet, this checkout is, and no other is fetched.
    assert first_cell(FOLDER, installed=False) == (
        [f'%pip install --quiet --editable "{FOLDER.parent}[analysis]"'],
        FOLDER.parent,
    )


@pytest.mark.parametrize(
    ("devices", "extras"),
    [
        ((), "analysis"),
        (("/dev/nvidia0",), "analysis,cuda12"),
        (("/dev/accel0",), "analysis,tpu"),
        (("/dev/vfio/0", "/dev/vfio/vfio"), "analysis,tpu"),
        (("/dev/vfio/vfio",), "analysis"),
    ],
)
def test_the_first_cell_installs_for_the_accelerator_and_once(first_cell, tmp_path, devices, extras):
    place = tmp_path / "attnorm"
    assert first_cell(tmp_path, devices) == (
        [CLONE, f'%pip install --quiet --editable "{place}[{extras}]"'],
        place,
    )
    # As after a restart of the kernel, which begins in the same folder as before.
    (place / "attnorm").mkdir(parents=True)
    (place / "attnorm" / "__init__.py").touch()
    assert first_cell(tmp_path, devices) == ([], place)
