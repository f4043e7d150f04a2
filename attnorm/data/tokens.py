"""Token folders: a corpus as one stream of ids on disk, mapped into memory; what does not fit in it starts here.

A folder holds ``tokens.bin``, the stream of :mod:`attnorm.data.packing` in little-endian uint16 or uint32, and
``tokens.json``, which gets its name last: without it the folder is not complete, and can be written again.
"""

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from attnorm.data.packing import FEWEST_TOKENS, join
from attnorm.data.tokenizers import Tokenizer

_STREAM, _FACTS, _FACTS_TMP = "tokens.bin", "tokens.json", "tokens.json.tmp"


class TokensError(ValueError):
    """A token folder that is not complete, or would be overwritten."""


class Written(NamedTuple):
    """The length of a stream, and how many documents of fewer than two tokens were left out of it."""

    num_tokens: int
    num_skipped: int


def write_tokens(folder: Path, documents: Iterable[str], tokenizer: Tokenizer) -> Written:
    """Writes the documents' stream, one document at a time.

    Args:
      folder: made where it does not exist.
      documents: texts; those that give fewer than two tokens are left out and counted.
      tokenizer: with an end-of-document id.

    Raises:
      TokensError: the folder holds tokens already.
      TokenizerError: a tokenizer without an end-of-document id.
      ValueError: no document of two tokens or more, or one that holds the end-of-document id.
    """
    folder = Path(folder)
    require_no_tokens(folder)
    end_of_document = tokenizer.end_of_document
    folder.mkdir(parents=True, exist_ok=True)
    dtype = "<u2" if tokenizer.vocab_size <= 2**16 else "<u4"
    num_tokens = num_documents = num_skipped = crc = 0
    stream_tmp, facts_tmp = folder / f"{_STREAM}.tmp", folder / _FACTS_TMP
    with open(stream_tmp, "wb") as file:
        for text in documents:
            ids = tokenizer.encode(text)
            if len(ids) < FEWEST_TOKENS:  # one in millions must not end what has taken hours
                num_skipped += 1
                continue
            try:
                stream = join([ids], end_of_document)
            except ValueError as error:
                index = num_documents + num_skipped
                raise ValueError(str(error).replace("documents[0]", f"documents[{index}]")) from None
            written = stream.astype(dtype).tobytes()
            file.write(written)
            crc = zlib.crc32(written, crc)
            num_tokens += len(stream)
            num_documents += 1
        file.flush()
        os.fsync(file.fileno())
    if not num_documents:
        raise ValueError(
            f"documents must hold one of at least {FEWEST_TOKENS} tokens, got {num_skipped} of fewer"
        )
    facts = {
        "num_tokens": num_tokens,
        "num_documents": num_documents,
        "dtype": dtype,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": end_of_document,
        "fingerprint": tokenizer.fingerprint,
        "crc32": crc,
    }
    facts_tmp.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    os.replace(stream_tmp, folder / _STREAM)
    os.replace(facts_tmp, folder / _FACTS)
    return Written(num_tokens, num_skipped)


def require_no_tokens(folder: Path) -> None:
    """Refuses a folder in which tokens would be overwritten; what a run that was cut off left is no result.

    Raises:
      TokensError: the folder holds tokens already.
    """
    facts = folder / _FACTS
    # Facts without their name show that the stream is of a run that ended between naming the one and the other.
    kept = [facts] if (folder / _FACTS_TMP).exists() else [folder / _STREAM, facts]
    for path in kept:
        if path.exists():
            raise TokensError(f"{path} exists already and would be overwritten")


def is_token_folder(folder: Path) -> bool:
    """Whether a folder holds tokens, complete or not."""
    return any((folder / name).is_file() for name in (_STREAM, _FACTS))


def open_tokens(folder: Path, tokenizer: Tokenizer) -> Int[np.ndarray, "S"]:
    """The stream of a token folder, mapped into memory.

    Args:
      folder: as :func:`write_tokens` wrote it.
      tokenizer: with which it was written.

    Raises:
      TokensError: no complete token folder, or one of another tokeniser.
    """
    folder = Path(folder)
    try:
        facts = _read_facts(folder)
        dtype = np.dtype(facts["dtype"])
        stream = np.memmap(folder / _STREAM, dtype, mode="r")
        wanted = facts["num_tokens"]
        written_with = {key: facts[key] for key in ("vocab_size", "end_of_document", "fingerprint")}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise TokensError(f"{folder} holds no complete tokens: {error!r}") from error
    if len(stream) != wanted:
        raise TokensError(f"{folder / _STREAM} has {len(stream):,} tokens, by {_FACTS} {wanted:,}")
    for key, value in written_with.items():
        if getattr(tokenizer, key) != value:
            raise TokensError(
                f"{folder} was written with {key} {value}, but the tokenizer has {getattr(tokenizer, key)}"
            )
    return stream


def tokens_crc(folder: Path) -> int:
    """The CRC-32 of a complete folder's stream as it was written; of gigabytes, that is not read again."""
    return _read_facts(folder)["crc32"]


def _read_facts(folder: Path) -> Mapping[str, Any]:
    return json.loads((folder / _FACTS).read_text(encoding="utf-8"))
