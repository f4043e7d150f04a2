"""Token folders from the command line: ``python -m attnorm.data --corpus CORPUS --tokenizer TOKENIZER --out DIR``."""

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tqdm import tqdm

from attnorm.data.packing import FEWEST_TOKENS
from attnorm.data.text import load_corpus
from attnorm.data.tfds_text import is_tfds, parse_tfds, tfds_texts
from attnorm.data.tokenizers import Tokenizer, TokenizerError, open_tokenizer, train_bpe
from attnorm.data.tokens import require_no_tokens, write_tokens

_BPE = "bpe:"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        texts = _texts(options.corpus)
        tokenizer = _tokenizer(options.tokenizer, texts, options.fit_documents, options.out)
        bar = tqdm(texts(), desc="documents", unit="", disable=None)
        num_tokens, num_skipped = write_tokens(options.out, bar, tokenizer)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"error: cannot write {error.filename or options.out}: {error.strerror}", file=sys.stderr)
        return 1
    skipped = (
        f"; documents of fewer than {FEWEST_TOKENS} tokens, left out: {num_skipped:,}" if num_skipped else ""
    )
    print(f"{num_tokens:,} tokens in {options.out}{skipped}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attnorm.data",
        description="Writes a corpus as one stream of token ids, from which training reads rows of any length. "
        "Nothing in DIR is overwritten; after an interruption the same command starts again.",
    )
    parser.add_argument(
        "--corpus",
        required=True,
        help="python_source, python_manual, bible, a text file, a folder of .txt files, or tfds:NAME:SPLIT, such as "
        "tfds:lm1b:train",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        help="bytes; bpe:SIZE, fitted to the corpus and kept in DIR; or a folder with a tokenizer.json",
    )
    parser.add_argument(
        "--fit-documents",
        metavar="N",
        type=int,
        help="fit bpe:SIZE to the first N documents only, which are in memory while it is; default: all",
    )
    parser.add_argument("--out", metavar="DIR", type=Path, required=True, help="folder, made if missing")
    return parser


def _texts(corpus: str) -> Callable[[], Iterable[str]]:
    """The texts, again at every call."""
    if is_tfds(corpus):
        name, split = parse_tfds(corpus)
        return lambda: tfds_texts(name, split)
    documents = load_corpus(corpus)
    return documents.values


def _tokenizer(
    name: str, texts: Callable[[], Iterable[str]], fit_documents: int | None, out: Path
) -> Tokenizer:
    if fit_documents is not None and not name.startswith(_BPE):
        raise TokenizerError(f"--fit-documents needs --tokenizer {_BPE}SIZE, got {name}")
    if fit_documents is not None and fit_documents < 1:
        raise TokenizerError(f"--fit-documents must be a whole number > 0, got {fit_documents}")
    if name.startswith(_BPE):
        size = name.removeprefix(_BPE)
        if not (size.isascii() and size.isdecimal()):
            raise TokenizerError(f"tokenizer must be {_BPE} and a whole number, got {name}")
        require_no_tokens(out)
        return train_bpe(itertools.islice(texts(), fit_documents), int(size), out)
    return open_tokenizer(name)


if __name__ == "__main__":
    sys.exit(main())
