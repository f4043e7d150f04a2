"""Token folders and TensorFlow Datasets: texts in, the same stream out, or an error that says what is missing."""

import contextlib
import os

import numpy as np
import pytest

from attnorm.data.__main__ import main
from attnorm.data.packing import join
from attnorm.data.text import TextError
from attnorm.data.tfds_text import tfds_texts
from attnorm.data.tokenizers import ByteTokenizer, PretrainedTokenizer, train_bpe
from attnorm.data.tokens import TokensError, open_tokens, write_tokens

TEXTS = ["one", "zwei", "três"]
BYTES = ByteTokenizer()


class WideTokenizer(ByteTokenizer):
    """Ids that 16 bits do not hold."""

    vocab_size = 70_001
    end_of_document = 70_000


@pytest.mark.parametrize("tokenizer, dtype", [(BYTES, np.uint16), (WideTokenizer(), np.uint32)])
def test_what_is_written_is_read(tmp_path, tokenizer, dtype):
    expected = join([tokenizer.encode(text) for text in TEXTS], tokenizer.end_of_document)
    assert write_tokens(tmp_path / "new", iter(TEXTS), tokenizer) == (len(expected), 0)
    stream = open_tokens(tmp_path / "new", tokenizer)
    assert stream.dtype == dtype
    np.testing.assert_array_equal(stream, expected)


def test_nothing_is_overwritten_and_nothing_incomplete_is_read(tmp_path):
    def cut_off():
        yield "one"
        raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        write_tokens(tmp_path, cut_off(), BYTES)
    with pytest.raises(TokensError, match="holds no complete tokens"):
        open_tokens(tmp_path, BYTES)
    write_tokens(tmp_path, TEXTS, BYTES)  # what was cut off is no result
    with pytest.raises(TokensError, match="tokens.bin exists already"):
        write_tokens(tmp_path, TEXTS, BYTES)
    with pytest.raises(TokensError, match="vocab_size 257, but the tokenizer has 70001"):
        open_tokens(tmp_path, WideTokenizer())
    os.truncate(tmp_path / "tokens.bin", 8)
    with pytest.raises(TokensError, match="tokens.bin has 4 tokens, by tokens.json 15"):
        open_tokens(tmp_path, BYTES)
    (tmp_path / "tokens.json").write_text("{}")
    with pytest.raises(TokensError, match="holds no complete tokens: KeyError"):
        open_tokens(tmp_path, BYTES)


def test_a_run_that_ends_between_naming_its_files_can_be_repeated(tmp_path, monkeypatch):
    replace = os.replace

    def cut_off(source, target):
        if target.name == "tokens.json":
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
        patch.setattr(os, "replace", cut_off)
        write_tokens(tmp_path, TEXTS, BYTES)
    assert (tmp_path / "tokens.bin").exists() and not (tmp_path / "tokens.json").exists()
    write_tokens(tmp_path, TEXTS[:1], BYTES)
    np.testing.assert_array_equal(open_tokens(tmp_path, BYTES), [256, *b"one"])


def test_tokens_of_another_tokenizer_of_the_same_size_are_not_read(tmp_path):
    pytest.importorskip("tokenizers")
    first, second = (
        train_bpe([text], 260, tmp_path / name) for name, text in (("a", "one two two"), ("b", "six ten ten"))
    )
    assert (first.vocab_size, first.end_of_document) == (second.vocab_size, second.end_of_document)
    write_tokens(tmp_path / "tokens", ["one two"], first)
    assert first.decode(open_tokens(tmp_path / "tokens", first)[1:]) == "one two"
    with pytest.raises(TokensError, match="was written with fingerprint .*, but the tokenizer has"):
        open_tokens(tmp_path / "tokens", second)


def test_documents_of_too_few_tokens_are_left_out_and_counted(tmp_path):
    written = write_tokens(tmp_path / "a", ["one", "", "zwei", "x"], BYTES)
    np.testing.assert_array_equal(open_tokens(tmp_path / "a", BYTES), [256, *b"one", 256, *b"zwei"])
    assert (written.num_tokens, written.num_skipped) == (9, 2)
    for texts, number in (([], 0), (["", "x"], 2)):
        message = f"documents must hold one of at least 2 tokens, got {number} of fewer"
        with pytest.raises(ValueError, match=message):
            write_tokens(tmp_path / "b", texts, BYTES)
        assert not list((tmp_path / "b").glob("*.json"))


def test_an_end_of_document_inside_a_document_is_an_error_that_counts_all_before(tmp_path):
    class EndsWithin(ByteTokenizer):
        def encode(self, text):
            ids = super().encode(text)
            return np.append(ids, self.end_of_document) if text == "end" else ids

    with pytest.raises(ValueError, match=r"documents\[2\] holds the end-of-document id 256"):
        write_tokens(tmp_path, ["one", "", "end"], EndsWithin())


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory):
    """A data set as tfds prepares it."""
    tfds = pytest.importorskip("tensorflow_datasets")

    class TinyTexts(tfds.core.GeneratorBasedBuilder):
        __module__ = "__main__"  # elsewhere tfds looks for files beside the module
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict({"text": tfds.features.Text()})
            )

        def _split_generators(self, manager):
            return {"train": self._generate_examples()}

        def _generate_examples(self):
            yield from enumerate({"text": text} for text in TEXTS)

    folder = tmp_path_factory.mktemp("tfds")
    TinyTexts(data_dir=folder, file_format="array_record").download_and_prepare()
    return folder


def test_texts_of_a_prepared_data_set(data_dir):
    assert sorted(tfds_texts("tiny_texts", "train", data_dir=data_dir)) == sorted(TEXTS)
    assert len(list(tfds_texts("tiny_texts", "train[:1]", data_dir=data_dir))) == 1


@pytest.mark.parametrize(
    "name, split, key, message",
    [
        ("tiny_texts", "test", "text", "has the splits train, got 'test'"),
        ("tiny_texts", "train", "words", "has the keys text, got 'words'"),
        ("no_such_texts", "train", "text", "'no_such_texts' is no data set of TensorFlow Datasets"),
        ("lm1b", "train", "text", "prepare it with: tfds build lm1b --file_format=array_record"),
    ],
)
def test_data_sets_that_are_not_there(data_dir, name, split, key, message):
    with pytest.raises(TextError, match=message):
        tfds_texts(name, split, data_dir=data_dir, key=key)


def test_command(tmp_path, capsys):
    book = tmp_path / "book.txt"
    book.write_text("one two two")
    out = tmp_path / "out"
    assert main(["--corpus", str(book), "--tokenizer", "bytes", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"12 tokens in {out}\n"
    np.testing.assert_array_equal(open_tokens(out, BYTES), [256, *b"one two two"])
    (tmp_path / "texts").mkdir()
    for name, text in (("a", "one"), ("b", "x")):
        (tmp_path / "texts" / f"{name}.txt").write_text(text)
    two = ["--corpus", str(tmp_path / "texts"), "--tokenizer", "bytes", "--out", str(tmp_path / "two")]
    assert main(two) == 0
    assert capsys.readouterr().out == (
        f"4 tokens in {tmp_path / 'two'}; documents of fewer than 2 tokens, left out: 1\n"
    )
    for corpus, tokenizer, message in [
        (book, "bytes", "tokens.bin exists already"),
        (tmp_path / "missing.txt", "bytes", "corpus must be one of"),
        ("tfds:lm1b", "bytes", "such as tfds:lm1b:train"),
        (book, "bpe:many", "bpe: and a whole number, got bpe:many"),
        (book, "bpe:²", "bpe: and a whole number, got bpe:²"),
    ]:
        assert main(["--corpus", str(corpus), "--tokenizer", tokenizer, "--out", str(out)]) == 1
        assert message in capsys.readouterr().err


def test_command_fits_a_tokenizer(tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("one two two two")
    arguments = ["--corpus", str(tmp_path), "--tokenizer", "bpe:260", "--out", str(tmp_path / "out")]
    assert main(arguments) == 0
    tokenizer = PretrainedTokenizer(tmp_path / "out")
    stream = open_tokens(tmp_path / "out", tokenizer)
    assert stream[0] == tokenizer.end_of_document
    assert tokenizer.decode(stream[1:]) == "one two two two"


def test_command_fits_a_tokenizer_to_the_first_documents(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    for name, text in (("a", "one two two two"), ("b", "six ten ten ten")):
        (tmp_path / f"{name}.txt").write_text(text)
    arguments = [
        "--corpus",
        str(tmp_path),
        "--fit-documents",
        "1",
        "--out",
        str(tmp_path / "out"),
        "--tokenizer",
    ]
    assert main([*arguments, "bpe:260"]) == 0
    tokenizer = PretrainedTokenizer(tmp_path / "out")
    assert len(tokenizer.encode("two")) < len("two") and len(tokenizer.encode("ten")) == len("ten")
    np.testing.assert_array_equal(
        np.sum(open_tokens(tmp_path / "out", tokenizer) == tokenizer.end_of_document), 2
    )
    for number, kind, message in [
        ("1", "bytes", "--fit-documents needs --tokenizer bpe:SIZE"),
        ("0", "bpe:260", "--fit-documents must be a whole number > 0, got 0"),
    ]:
        arguments[3], arguments[5] = number, str(tmp_path / "other")
        assert main([*arguments, kind]) == 1
        assert message in capsys.readouterr().err
        assert not (tmp_path / "other").exists()


def test_command_that_was_cut_off_starts_again(tmp_path, monkeypatch, capsys):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("one two two two")
    out = tmp_path / "out"
    arguments = ["--corpus", str(tmp_path / "a.txt"), "--out", str(out), "--tokenizer"]

    def cut_off(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("attnorm.data.__main__.write_tokens", cut_off)
        main([*arguments, "bpe:260"])
    assert [path.name for path in out.iterdir()] == ["tokenizer.json"]
    assert main([*arguments, "bpe:261"]) == 1
    assert "is another tokenizer" in capsys.readouterr().err
    assert main([*arguments, "bpe:260"]) == 0
    tokenizer = PretrainedTokenizer(out)
    assert tokenizer.decode(open_tokens(out, tokenizer)[1:]) == "one two two two"


def test_command_adds_no_tokenizer_to_tokens_of_another(tmp_path, capsys):
    pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("one two two two")
    write_tokens(tmp_path / "out", TEXTS, BYTES)
    arguments = [
        "--corpus",
        str(tmp_path / "a.txt"),
        "--tokenizer",
        "bpe:260",
        "--out",
        str(tmp_path / "out"),
    ]
    assert main(arguments) == 1
    assert "tokens.bin exists already and would be overwritten" in capsys.readouterr().err
    assert not (tmp_path / "out" / "tokenizer.json").exists()


def test_command_names_what_ends_no_document(tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers")
    (tmp_path / "a.txt").write_text("one")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"one": 0}, unk_token="one")).save(
        str(tmp_path / "tokenizer.json")
    )
    out = tmp_path / "out"
    assert main(["--corpus", str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert f"the tokenizer in {tmp_path} must have a token for the end of a document" in error
    assert "<|endoftext|>, <|end_of_text|>, <eos>" in error
    assert not out.exists()
