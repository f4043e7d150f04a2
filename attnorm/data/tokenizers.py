"""From text to ids and back: bytes, or the byte-pair encoding that a published model was trained with."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Protocol

import numpy as np
from jaxtyping import Int

from attnorm.extras import install_hint

_LARGEST_VOCAB = 2**24
# The first that a vocabulary has. Where others are known, </s> may be a tag and <|eot_id|> the end of a chat's turn.
_END_OF_DOCUMENT = ("<|endoftext|>", "<|end_of_text|>", "<eos>", "</s>", "<|eot_id|>", "[SEP]")


class Tokenizer(Protocol):
    vocab_size: int
    fingerprint: str  # another one for every other tokeniser

    @property
    def end_of_document(self) -> int:
        """An id that no text gives."""

    def encode(self, text: str) -> Int[np.ndarray, "T"]: ...

    def decode(self, ids: Int[np.ndarray, "T"]) -> str: ...


class TokenizerError(ValueError):
    """A tokeniser that is not there, or of a kind that cannot be used."""


class ByteTokenizer:
    """The bytes of the text in UTF-8: nothing to download, nothing to train, no text that it cannot hold.

    >>> from attnorm.data.tokenizers import ByteTokenizer
    >>> ids = ByteTokenizer().encode("né")
    >>> ids, ByteTokenizer().decode(ids)
    (array([110, 195, 169], dtype=int32), 'né')
    """

    vocab_size = 257
    end_of_document = 256
    fingerprint = "bytes"

    def encode(self, text: str) -> Int[np.ndarray, "T"]:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def decode(self, ids: Int[np.ndarray, "T"]) -> str:
        """The text; what is cut off within a character, or is no byte, becomes a replacement character."""
        return b"".join(bytes([i]) if i < 256 else b"\xff" for i in ids).decode("utf-8", errors="replace")


class PretrainedTokenizer:
    """The tokeniser of a Hugging Face checkpoint, by the tokenizers package.

    No special tokens are added, those that a text spells out are text, and nothing is cut off.

    Args:
      folder: with tokenizer.json, or with GPT-2's vocab.json and merges.txt.

    Raises:
      TokenizerError: these files are missing or cannot be read.
      ModuleNotFoundError: the tokenizers package is not installed.
    """

    def __init__(self, folder: Path):
        tokenizers = _tokenizers()
        folder = Path(folder)
        file, vocab, merges = (folder / name for name in ("tokenizer.json", "vocab.json", "merges.txt"))
        try:
            if file.is_file():
                files: tuple[Path, ...] = (file,)
                tokenizer = tokenizers.Tokenizer.from_file(str(file))
            elif vocab.is_file() and merges.is_file():
                files = (vocab, merges)
                tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
                # GPT-2 tells the first word of a text, which no space precedes, from the others.
                tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
                tokenizer.decoder = tokenizers.decoders.ByteLevel()
            else:
                raise TokenizerError(
                    f"{folder} has no tokenizer: neither tokenizer.json nor vocab.json and merges.txt"
                )
        # The package raises plain Exception for what it cannot read.
        except Exception as error:
            if isinstance(error, TokenizerError):
                raise
            raise TokenizerError(f"the tokenizer in {folder} cannot be read: {error}") from error
        # A text that writes <|endoftext|> does not end there.
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.get_vocab_size()
        self.fingerprint = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
        self._folder = folder

    @property
    def end_of_document(self) -> int:
        """The id, which encoding alone does not need.

        Raises:
          TokenizerError: none of the tokens that are known to end a text is in the vocabulary.
        """
        for token in _END_OF_DOCUMENT:
            index = self._tokenizer.token_to_id(token)
            if index is not None:
                return index
        raise TokenizerError(
            f"the tokenizer in {self._folder} must have a token for the end of a document, one of "
            f"{', '.join(_END_OF_DOCUMENT)}"
        )

    def encode(self, text: str) -> Int[np.ndarray, "T"]:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Int[np.ndarray, "T"]) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def open_tokenizer(name: str) -> Tokenizer:
    """The tokeniser of that name: "bytes", or a folder as :class:`PretrainedTokenizer` takes it; errors as there.

    >>> from attnorm.data.tokenizers import open_tokenizer
    >>> open_tokenizer("bytes").vocab_size
    257
    """
    return ByteTokenizer() if name == "bytes" else PretrainedTokenizer(Path(name).expanduser())


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path) -> PretrainedTokenizer:
    """A byte-level byte-pair encoding, GPT-2's kind, fitted to texts, and written to ``folder/tokenizer.json``.

    Args:
      texts: to fit to.
      vocab_size: how many there are at most; from 257, for all bytes and the end of a document, to 2^24.
      folder: made where it does not exist; it may hold the same tokenizer, of a run that was cut off.

    Raises:
      ValueError: a vocabulary that is too small or too large.
      TokenizerError: the folder has another tokenizer already, which would be overwritten.
      ModuleNotFoundError: the tokenizers package is not installed.
    """
    tokenizers = _tokenizers()
    if not 257 <= vocab_size <= _LARGEST_VOCAB:
        raise ValueError(f"vocab_size must be at least 257 and at most {_LARGEST_VOCAB}, got {vocab_size}")
    file = Path(folder) / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_DOCUMENT[0]],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fitted = tokenizer.to_str(pretty=True)
    if file.exists() and file.read_text(encoding="utf-8") != fitted:
        raise TokenizerError(f"{file} exists already, is another tokenizer, and would be overwritten")
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(fitted, encoding="utf-8")
    os.replace(temporary, file)
    return PretrainedTokenizer(file.parent)


def _tokenizers() -> ModuleType:
    try:
        import tokenizers
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"byte-pair encodings need the tokenizers package; {install_hint('analysis')}",
            name=error.name,
        ) from error
    return tokenizers
