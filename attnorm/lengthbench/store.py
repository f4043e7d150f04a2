"""Cells as files: written whole, with a checksum, and read only where it fits."""

import hashlib
import json
import urllib.parse
from pathlib import Path
from typing import Any

from attnorm.analysis.files import write_atomically

Cell = dict[str, Any]


class DamagedCell(ValueError):
    """A cell file that is not what was written."""


def cell_path(out: Path, task: str, contender: str) -> Path:
    """One file for each pair; different names never share one.

    >>> from pathlib import Path
    >>> from attnorm.lengthbench.store import cell_path
    >>> cell_path(Path("out"), "mqar", "lp(p=4)@learned").as_posix()
    'out/cells/mqar/lp(p=4)@learned.json'
    """
    return out / "cells" / task / f"{urllib.parse.quote(contender, safe='()=@,')}.json"


def write_cell(path: Path, cell: Cell) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = json.dumps({"checksum": _checksum(cell), "cell": cell}, indent=1) + "\n"
    write_atomically(path, content.encode())


def read_cell(path: Path) -> Cell | None:
    """The cell, or None where there is no file.

    Raises:
      DamagedCell: the file was cut off or changed.
    """
    try:
        file = json.loads(path.read_text(encoding="utf-8"))
        cell, checksum = file["cell"], file["checksum"]
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedCell(f"{path} is no cell: {error!r}") from error
    if checksum != _checksum(cell):
        raise DamagedCell(f"{path} does not fit its checksum")
    return cell


def _checksum(cell: Cell) -> str:
    return hashlib.sha256(json.dumps(cell, sort_keys=True).encode()).hexdigest()
