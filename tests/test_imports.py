"""Imports inside attnorm go one way, and the library half needs jax and numpy alone."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import attnorm

ROOT = Path(attnorm.__file__).parent

# A part may import its own layer and those before it. "attnorm" is the package's own __init__.
LAYERS = [
    {"_compat", "extras", "finite", "tiling", "topology", "hlo"},
    {"normalizers", "masks", "dropout", "cache"},
    {
        "places",
        "rows",
        "tile_layout",
        "output_norms",
        "arguments",
        "sharding",
        "reference",
        "chunked",
        "chunked_rows",
        "chunked_solver",
        "kernels",
    },
    {"attention"},
    {"decoding", "generation", "context"},
    {"attnorm"},
    {"flax_adapter", "modules"},
    {"models", "data"},
    {"analysis"},
    {"training"},
]
RANK = {part: rank for rank, layer in enumerate(LAYERS) for part in layer}
# These stand beside the layers: what they may import, and nobody below the given layer imports them.
BESIDE = {
    "theory": {"normalizers"},
    "catalogue": {"attention", "attnorm", "bench"},
    # What it measures of training and decoding are the training loop and the decoder.
    "bench": {part for part, rank in RANK.items() if rank <= RANK["attnorm"]} | {"models", "training"},
    "lengthbench": {*RANK, "bench"},
}
MAY_IMPORT_THEORY = {"analysis", "training"}

LIBRARY = {part for part, rank in RANK.items() if rank <= RANK["attnorm"]} | {"theory"}
LIBRARY_NEEDS = {"jax", "numpy", "jaxtyping"}
HEAVY = {"flax", "optax", "orbax", "grain", "tensorflow_datasets", "matplotlib", "ml_collections"}


def part_of(module: str) -> str:
    """attnorm.normalizers.lp -> normalizers; attnorm -> attnorm."""
    return module.split(".")[1] if "." in module else module


def imported_modules(path: Path) -> set[str]:
    """The absolute names of all modules that a file imports, anywhere in it."""
    package = ["attnorm", *path.relative_to(ROOT).parent.parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # "from attnorm import theory" names a module, "from attnorm import lp" does not.
                submodule = ROOT.joinpath(*module.split(".")[1:], alias.name)
                is_module = module.split(".")[0] == "attnorm" and (
                    submodule.is_dir() or submodule.with_suffix(".py").is_file()
                )
                found.add(f"{module}.{alias.name}" if is_module else module)
    return found


def files() -> dict[Path, str]:
    """Every Python file of the package and the part it belongs to."""
    paths = sorted(ROOT.rglob("*.py"))
    return {
        path: path.relative_to(ROOT).with_suffix("").parts[0].replace("__init__", "attnorm") for path in paths
    }


def dependencies() -> dict[str, dict[str, Path]]:
    """For each part, the other parts it imports, with a file that does."""
    found: dict[str, dict[str, Path]] = {}
    for path, part in files().items():
        for module in imported_modules(path):
            if module.split(".")[0] == "attnorm" and part_of(module) != part:
                found.setdefault(part, {})[part_of(module)] = path
    return found


def test_every_part_has_a_place():
    assert set(files().values()) <= set(RANK) | set(BESIDE)


def test_imports_go_one_way():
    wrong = []
    for part, imported in dependencies().items():
        for other, path in imported.items():
            if part in BESIDE:
                allowed = other in BESIDE[part]
            elif other == "theory":
                allowed = part in MAY_IMPORT_THEORY
            else:
                allowed = other in RANK and RANK[other] <= RANK[part]
            if not allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports attnorm.{other}")
    assert not wrong


def test_no_two_parts_import_each_other():
    graph = {part: set(imported) for part, imported in dependencies().items()}
    assert list(TopologicalSorter(graph).static_order())


def test_library_imports_jax_and_numpy_alone():
    for path, part in files().items():
        if part in LIBRARY:
            packages = {module.split(".")[0] for module in imported_modules(path)}
            foreign = packages - set(sys.stdlib_module_names) - LIBRARY_NEEDS - {"attnorm"}
            assert not foreign, path


@pytest.mark.parametrize("module", ["attnorm", "attnorm.theory"])
def test_importing_the_library_loads_no_training_package(module):
    command = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    loaded = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    packages = set(loaded.stdout.split())
    assert {"attnorm", "jax"} <= packages
    assert not packages & HEAVY


def test_reading_of_import_statements(tmp_path, monkeypatch):
    """The check itself sees every form of import."""
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "normalizers").mkdir()
    (tmp_path / "theory.py").touch()
    file = tmp_path / "normalizers" / "lp.py"
    file.write_text(
        "import jax.numpy as jnp\n"
        "from attnorm import theory, lp\n"
        "from . import rule\n"
        "from ..masks import Visibility\n"
        "def f():\n"
        "    from attnorm.training.loop import run\n"
    )
    assert imported_modules(file) == {
        "jax.numpy",
        "attnorm",
        "attnorm.theory",
        "attnorm.normalizers",
        "attnorm.masks",
        "attnorm.training.loop",
    }
