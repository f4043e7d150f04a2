"""Texts: a file of the user's, and two corpora that come with Python, so that they are on every machine."""

import sysconfig
import tokenize
from collections.abc import Mapping
from pathlib import Path

# Not part of the library: what was installed, tests with odd encodings, and what building Python wrote.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_SKIPPED_FILES = "_sysconfigdata"


class TextError(ValueError):
    """A text that is not there, empty, or not UTF-8."""


def read_text(path: str | Path) -> str:
    """The text of a file, without a byte order mark.

    Raises:
      TextError: the file does not exist, is empty, or is not UTF-8; the message names the position.
    """
    try:
        text = Path(path).expanduser().read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise TextError(
            f"{path} is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}. Convert it, for example "
            f"with: iconv -f latin1 -t utf-8"
        ) from error
    except OSError as error:
        raise TextError(f"{path} cannot be read: {error.strerror}") from error
    if not text.strip():
        raise TextError(f"{path} is empty")
    return text


def python_manual() -> Mapping[str, str]:
    """0.5 MB of English: the parts of Python's language reference that ``help()`` shows, by topic.

    >>> from attnorm.data.text import python_manual
    >>> "The Python interpreter" in " ".join(python_manual().values())
    True
    """
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError as error:
        raise TextError("this Python comes without pydoc_data, the text of its manual") from error
    return dict(sorted(topics.items()))


def english() -> str:
    """The text of :func:`python_manual` in one piece."""
    return "\n\n".join(python_manual().values())


def python_source() -> Mapping[str, str]:
    """About 12 MB of source: Python's own standard library, by path; the same for each version of Python.

    >>> from attnorm.data.text import python_source
    >>> "def dumps(" in python_source()["json/__init__.py"]
    True
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        path.relative_to(root)
        for path in root.rglob("*.py")
        if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts)
        and not path.name.startswith(_SKIPPED_FILES)
    )
    if not paths:
        raise TextError(f"this Python comes without the source of its library: no .py file in {root}")
    documents = {}
    for path in paths:
        with tokenize.open(root / path) as file:  # by the encoding that the file declares
            documents[path.as_posix()] = file.read()
    return {name: text for name, text in documents.items() if text.strip()}
