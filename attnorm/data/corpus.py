"""What a language model is trained on and what it is tested on: two streams of ids that share no document."""

import dataclasses
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Int

from attnorm.data.packing import FEWEST_TOKENS, join
from attnorm.data.text import TextError, load_corpus, split_corpus
from attnorm.data.tfds_text import is_tfds, tfds_corpus
from attnorm.data.tokenizers import Tokenizer
from attnorm.data.tokens import is_token_folder, open_tokens, tokens_crc

_CHUNK = 2**24  # tokens that are counted at a time


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Streams as :func:`attnorm.data.packing.join` makes them, and a sentence that says what they are.

    The fingerprint is another one for other tokens, whatever they are called.
    """

    train: Int[np.ndarray, "S"]
    held_out: Int[np.ndarray, "S"]
    facts: str
    fingerprint: str


def open_corpus(name: str, tokenizer: Tokenizer, held_out: float) -> Corpus:
    """The corpus of that name, in ids, with a part of its documents held out.

    Documents are held out by a hash of their names, of a token folder the last ones. A single text is cut in
    two. All but a token folder is in memory.

    Args:
      name: as :func:`attnorm.data.text.load_corpus` knows them; "tfds:NAME:SPLIT", such as "tfds:lm1b:train";
        or a token folder, which ``python -m attnorm.data`` writes.
      tokenizer: with an end-of-document id.
      held_out: the part, in (0, 1).

    Raises:
      TextError: there is no such corpus, it cannot be read, or a document has fewer than two tokens.
      TokensError: a token folder that is not complete, or of another tokeniser.
      ValueError: a part outside (0, 1), or one that leaves a side without documents.

    >>> from attnorm.data.corpus import open_corpus
    >>> from attnorm.data.tokenizers import ByteTokenizer
    >>> corpus = open_corpus("python_manual", ByteTokenizer(), held_out=0.1)
    >>> len(corpus.held_out) < len(corpus.train)
    True
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must be in (0, 1), got {held_out!r}")
    end = tokenizer.end_of_document
    if is_token_folder(Path(name).expanduser()):
        folder = Path(name).expanduser()
        stream = open_tokens(folder, tokenizer)
        train, test = _cut_between_documents(stream, held_out, end)
        facts = (
            f"{name}: {len(train):,} tokens to train on; held out, the last {len(test):,}, other documents"
        )
        return Corpus(train, test, facts, f"crc32 {tokens_crc(folder):08x}")
    documents = tfds_corpus(name) if is_tfds(name) else load_corpus(name)
    sides = split_corpus(documents, held_out)
    train, test = (join(_encoded(side, tokenizer), end) for side in sides)
    facts = f"{name}: {len(train):,} tokens in {len(sides[0]):,} documents to train on; held out, "
    if len(documents) == 1:
        facts += f"the last {len(test):,} of this one text"
    else:
        facts += f"{len(test):,} tokens in {len(sides[1]):,} other documents"
    return Corpus(train, test, facts, f"crc32 {zlib.crc32(test.data, zlib.crc32(train.data)):08x}")


def unigram_entropy(stream: Int[np.ndarray, "S"]) -> float:
    """Nats per token of a stream: the smallest loss without any context, of its own token frequencies.

    >>> from attnorm.data.corpus import unigram_entropy
    >>> round(unigram_entropy(np.array([0, 1, 0, 1])), 4)
    0.6931
    """
    counts = np.zeros(0, np.int64)
    for start in range(0, len(stream), _CHUNK):  # bincount copies what it counts to 64 bits
        more = np.bincount(stream[start : start + _CHUNK], minlength=len(counts))
        more[: len(counts)] += counts
        counts = more
    frequencies = counts[counts > 0] / len(stream)
    return float(-np.sum(frequencies * np.log(frequencies)))


def pieces(
    stream: Int[np.ndarray, "S"], length: int, count: int, end_of_document: int
) -> Int[np.ndarray, "M T+1"]:
    """Pieces of T tokens, each of one document and behind its end-of-document id, from as many documents as possible.

    Each document gives n or n - 1 pieces, or all it has where these are fewer, for the n that makes up the count.

    Raises:
      ValueError: the documents have fewer such pieces.

    >>> from attnorm.data.corpus import pieces
    >>> pieces(np.array([0, 1, 2, 3, 4, 5, 0, 6, 7, 0, 8]), length=2, count=3, end_of_document=0)
    array([[0, 1, 2],
           [0, 3, 4],
           [0, 6, 7]], dtype=int32)
    """
    starts = np.flatnonzero(stream == end_of_document) + 1
    sizes = np.append(starts[1:] - 1, len(stream)) - starts
    held = sizes // length
    if sum(held) < count:
        raise ValueError(
            f"{count} pieces of {length:,} tokens are needed, but the documents that are held out have "
            f"{sum(held)}; the longest document has {max(sizes):,} tokens"
        )
    most = next(n for n in range(1, count + 1) if np.sum(np.minimum(held, n)) >= count)
    given = np.minimum(held, most - 1)
    more = count - np.sum(given)
    able = np.flatnonzero(held >= most)
    given[able[np.arange(more) * len(able) // more]] += 1
    begins = np.concatenate(
        [
            start + length * (np.arange(own) * number // own)
            for start, number, own in zip(starts, held, given, strict=True)
            if own
        ]
    )
    return np.stack(
        [np.append(np.int32(end_of_document), stream[begin : begin + length]) for begin in begins]
    ).astype(np.int32)


def _encoded(documents: Mapping[str, str], tokenizer: Tokenizer) -> Iterator[Int[np.ndarray, "n"]]:
    for name, text in documents.items():
        ids = tokenizer.encode(text)
        if len(ids) < FEWEST_TOKENS:
            raise TextError(
                f"the document {name!r} must have at least {FEWEST_TOKENS} tokens, got {len(ids)}"
            )
        yield ids


def _cut_between_documents(stream, held_out, end_of_document):
    wanted = math.floor(len(stream) * (1 - held_out))
    later = np.flatnonzero(stream[wanted:] == end_of_document)
    if not later.size or wanted + later[0] == 0:
        raise ValueError(f"held_out = {held_out} leaves a side of the token folder without a whole document")
    cut = wanted + later[0]
    return stream[:cut], stream[cut:]
