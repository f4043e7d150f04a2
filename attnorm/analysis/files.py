"""Tables and figures as files: written whole or not at all."""

import csv
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path


def csv_bytes(rows: Sequence[dict]) -> bytes:
    """A table; the first row's keys are its columns."""
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def png_bytes(figure) -> bytes:
    """A Matplotlib figure as a PNG image."""
    content = io.BytesIO()
    figure.savefig(content, format="png")
    return content.getvalue()


def write_atomically(path: Path, content: bytes) -> None:
    """Whoever reads the file, or interrupts the writing, meets the old or the new content, whole."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
        temporary = Path(file.name)
        try:
            file.write(content)
            file.close()
            temporary.chmod(0o644)
            temporary.replace(path)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError):
                error.filename = str(path)  # a full disk does not say which file it had no room for
            raise
