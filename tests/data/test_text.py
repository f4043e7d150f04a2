"""Texts and tokenisers: what is read comes back, and what cannot be read is named."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from attnorm.data import text as texts
from attnorm.data.text import (
    TextError,
    load_corpus,
    python_manual,
    python_source,
    read_text,
    split_corpus,
)
from attnorm.data.tokenizers import ByteTokenizer, PretrainedTokenizer, TokenizerError, train_bpe

GPT2 = Path(__file__).parents[1] / "models" / "pretrained" / "tiny_gpt2"
SAMPLE = "the cat sat on the other mat;  Ünïcödé 🙂\n\n\t3.14159 <that> is that"


def test_a_users_file(tmp_path):
    file = tmp_path / "book.txt"
    file.write_bytes("\ufeffÜber Katzen\r\n".encode())
    assert read_text(file) == "Über Katzen\r\n"
    file.write_bytes("Über".encode("latin1"))
    with pytest.raises(TextError, match="book.txt is not UTF-8: byte 0 is 0xdc. Convert it"):
        read_text(file)
    file.write_text(" \n")
    with pytest.raises(TextError, match="book.txt is empty"):
        read_text(file)
    with pytest.raises(TextError, match="missing.txt cannot be read: No such file"):
        read_text(tmp_path / "missing.txt")
    with pytest.raises(TextError, match="cannot be read: Is a directory"):
        read_text(tmp_path)


def test_pythons_manual_and_source_are_whole():
    assert sum(map(len, python_manual().values())) > 400_000
    source = python_source()
    assert list(source) == sorted(source, key=lambda name: Path(name).parts)
    assert sum(map(len, source.values())) > 8_000_000
    assert Path(json.__file__).read_text(encoding="utf-8") == source["json/__init__.py"]
    assert not [
        name for name in source if "site-packages" in name or "/test/" in name or "sysconfigdata" in name
    ]


def test_no_source_that_is_held_out_is_a_copy_of_what_is_trained_on():
    train, held_out = split_corpus(python_source(), 0.1)
    known = {line for text in train.values() for line in text.splitlines()}
    copied = {}
    for name, text in held_out.items():
        lines = [line for line in text.splitlines() if len(line.strip()) >= 40]
        if len(lines) >= 10:  # not a few of a licence
            copied[name] = sum(line in known for line in lines) / len(lines)
    assert len(copied) >= 20 and max(copied.values()) <= 0.5, copied


def test_source_keeps_out_what_is_not_the_library(tmp_path, monkeypatch):
    for name in (
        "abc.py",
        "encodings/cp1.py",
        "site-packages/x.py",
        "json/tests/y.py",
        "_sysconfigdata_linux.py",
        "empty.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("" if name == "empty.py" else "x = 1\n")
    (tmp_path / "old.py").write_bytes("# -*- coding: latin1 -*-\nname = 'Ü'\n".encode("latin1"))
    monkeypatch.setattr(texts.sysconfig, "get_path", lambda name: str(tmp_path))
    assert python_source() == {"abc.py": "x = 1\n", "old.py": "# -*- coding: latin1 -*-\nname = 'Ü'\n"}
    monkeypatch.setattr(texts.sysconfig, "get_path", lambda name: str(tmp_path / "nothing"))
    with pytest.raises(TextError, match="without the source of its library"):
        python_source()


def test_bytes_hold_every_text():
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode(SAMPLE)
    assert ids.tolist() == list(SAMPLE.encode())
    assert tokenizer.decode(ids) == SAMPLE
    assert tokenizer.decode(np.array([104, 105, tokenizer.end_of_document])) == "hi\ufffd"
    assert tokenizer.end_of_document == tokenizer.vocab_size - 1 == 256


def test_pretrained_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = PretrainedTokenizer(GPT2)
    ids = tokenizer.encode(SAMPLE)
    assert len(ids) < len(SAMPLE.encode())
    assert tokenizer.decode(ids) == SAMPLE
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (280, 0)
    assert tokenizer.end_of_document not in ids

    # The older form of the same tokeniser.
    model = json.loads((GPT2 / "tokenizer.json").read_text())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges))
    np.testing.assert_array_equal(PretrainedTokenizer(tmp_path).encode(SAMPLE), ids)

    # A checkpoint's own limits on length do not cut texts off.
    limited = tokenizers.Tokenizer.from_file(str(GPT2 / "tokenizer.json"))
    limited.enable_truncation(4)
    limited.enable_padding(length=100)
    limited.save(str(tmp_path / "tokenizer.json"))
    np.testing.assert_array_equal(PretrainedTokenizer(tmp_path).encode(SAMPLE), ids)


def test_pretrained_tokenizers_that_cannot_be_read(tmp_path):
    pytest.importorskip("tokenizers")
    with pytest.raises(TokenizerError, match="neither tokenizer.json nor vocab.json and merges.txt"):
        PretrainedTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="the tokenizer in .* cannot be read"):
        PretrainedTokenizer(tmp_path)


@pytest.mark.parametrize(
    "vocab, end",
    [
        (["a", "[SEP]", "</s>"], "</s>"),
        (["</s>", "<eos>"], "<eos>"),
        (["<|eot_id|>", "<|end_of_text|>"], "<|end_of_text|>"),
        (["<|eot_id|>"], "<|eot_id|>"),
    ],
)
def test_end_of_document_by_its_names(tmp_path, vocab, end):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token=vocab[0])
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    assert PretrainedTokenizer(tmp_path).end_of_document == vocab.index(end)


def test_without_the_tokenizers_package(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    for make in (lambda: PretrainedTokenizer(GPT2), lambda: train_bpe([SAMPLE], 270, tmp_path)):
        with pytest.raises(
            ModuleNotFoundError, match=r'in the checkout: pip install --editable "\.\[analysis\]"'
        ):
            make()


def test_trained_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    texts = [SAMPLE, SAMPLE + " and the other"]
    tokenizer = train_bpe(texts, 270, tmp_path / "new")
    assert tokenizer.vocab_size == 270
    for text in (SAMPLE, "what it was not fitted to: 日本語 \x00"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.end_of_document not in tokenizer.encode(text)
    assert len(tokenizer.encode(SAMPLE)) < len(SAMPLE.encode())
    spelled = "a text about <|endoftext|>, which goes on"
    assert tokenizer.end_of_document not in tokenizer.encode(spelled)
    assert tokenizer.decode(tokenizer.encode(spelled)) == spelled
    again = train_bpe(texts, 270, tmp_path / "again")
    np.testing.assert_array_equal(again.encode(SAMPLE), tokenizer.encode(SAMPLE))
    kept = (tmp_path / "new" / "tokenizer.json").read_bytes()
    train_bpe(texts, 270, tmp_path / "new")  # the same again is no loss
    with pytest.raises(
        TokenizerError, match="exists already, is another tokenizer, and would be overwritten"
    ):
        train_bpe(texts, 271, tmp_path / "new")
    assert (tmp_path / "new" / "tokenizer.json").read_bytes() == kept
    with pytest.raises(ValueError, match="vocab_size must be at least 257 and at most .*, got 256"):
        train_bpe(texts, 256, tmp_path / "small")
    with pytest.raises(ValueError, match="vocab_size must be at least 257 and at most 16777216"):
        train_bpe(texts, 10**30, tmp_path / "large")


def test_corpora(tmp_path):
    assert load_corpus("python_manual") == python_manual()
    (tmp_path / "part").mkdir()
    for name in ("b.txt", "part/a.txt", "notes.md"):
        (tmp_path / name).write_text(name)
    assert load_corpus(tmp_path) == {"b.txt": "b.txt", "part/a.txt": "part/a.txt"}
    assert load_corpus(tmp_path / "notes.md") == {"notes.md": "notes.md"}
    with pytest.raises(
        TextError, match="one of python_source, python_manual, bible, or a file or folder, got python_code"
    ):
        load_corpus("python_code")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(TextError, match="bad.txt is not UTF-8"):
        load_corpus(tmp_path)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(TextError, match="holds no .txt file"):
        load_corpus(tmp_path / "nothing")


def test_held_out_documents():
    corpus = {f"document {i}": str(i) for i in range(1000)}
    train, held_out = split_corpus(corpus, 0.1)
    assert train | held_out == corpus and not train.keys() & held_out.keys()
    assert 60 < len(held_out) < 140
    more = split_corpus(corpus | {"another": "x"}, 0.1)[1]
    assert held_out.keys() <= more.keys()  # a document keeps its side, whatever else there is
    with pytest.raises(ValueError, match=r"held_out must be in \(0, 1\), got 1.5"):
        split_corpus(corpus, 1.5)
    with pytest.raises(ValueError, match="leaves a side of 1 documents without text"):
        split_corpus({"a": "x"}, 0.1)
