"""Texts from TensorFlow Datasets, by ``tfds.data_source``: array_record files, without TensorFlow."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from attnorm.data.text import TextError

_PREFIX = "tfds:"


def is_tfds(corpus: str) -> bool:
    """Whether a corpus is named as :func:`parse_tfds` wants it."""
    return corpus.startswith(_PREFIX)


def parse_tfds(corpus: str) -> tuple[str, str]:
    """Name and split of "tfds:NAME:SPLIT".

    Raises:
      TextError: another form.

    >>> from attnorm.data.tfds_text import parse_tfds
    >>> parse_tfds("tfds:c4/en:train[:1%]")
    ('c4/en', 'train[:1%]')
    """
    name, colon, split = corpus.removeprefix(_PREFIX).partition(":")
    if not is_tfds(corpus) or not colon:
        raise TextError(f"corpus must name a split, such as {_PREFIX}{name}:train, got {corpus}")
    return name, split


def tfds_corpus(corpus: str) -> Mapping[str, str]:
    """All texts of "tfds:NAME:SPLIT", by their number. Errors as in :func:`parse_tfds` and :func:`tfds_texts`."""
    return {str(number): text for number, text in enumerate(tfds_texts(*parse_tfds(corpus)))}


def tfds_texts(name: str, split: str, *, data_dir: Path | None = None, key: str = "text") -> Iterator[str]:
    """The texts of a prepared data set, in its order.

    Args:
      name: such as ``"lm1b"``, ``"wikipedia/20230601.en"``, ``"c4/en"``.
      split: such as ``"train"``, ``"validation[:1%]"``.
      data_dir: where it was prepared; by default ``~/tensorflow_datasets`` or ``$TFDS_DATA_DIR``.
      key: of the text in an example.

    Raises:
      TextError: there is no such data set, split or key, or it was not prepared; the message says how.
    """
    import tensorflow_datasets as tfds
    from tensorflow_datasets.core import DatasetNotFoundError

    try:
        builder = tfds.builder(name, data_dir=data_dir)
    except DatasetNotFoundError as error:
        raise TextError(f"{name!r} is no data set of TensorFlow Datasets, nor one in {data_dir}") from error
    prepare = f"tfds build {name} --file_format=array_record"
    where = builder.data_dir
    if not Path(where).is_dir():
        raise TextError(f"the data set {name!r} is not in {where}; prepare it with: {prepare}")
    try:
        source = builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise TextError(f"{where} is not in array_record files; prepare it again with: {prepare}") from error
    except ValueError as error:
        splits = ", ".join(builder.info.splits)
        raise TextError(f"the data set {name!r} has the splits {splits}, got {split!r}") from error
    if key not in builder.info.features:
        keys = ", ".join(builder.info.features)
        raise TextError(f"the data set {name!r} has the keys {keys}, got {key!r}")
    return _texts(source, key)


def _texts(source, key):
    for index in range(len(source)):
        text = source[index][key]
        yield text.decode("utf-8") if isinstance(text, bytes) else str(text)
