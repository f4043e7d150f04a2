"""The normalisers as a Markdown table, from the registry and the docstrings: ``python -m attnorm.catalogue``."""

from __future__ import annotations

import inspect
import re

import attnorm
from attnorm.attention import implementations_of

_HEADER = ("name", "weights", "parameters and defaults", "passes over the keys", "implementations", "source")


def table() -> str:
    """One row for each normaliser.

    >>> from attnorm.catalogue import table
    >>> print(table().splitlines()[3][:44])
    | `l2` | `exp(s_j) / sqrt(Σ_k exp(2 s_k))` |
    """
    rows = [_HEADER, ("---",) * len(_HEADER), *map(_row, attnorm.normalizer_names())]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(name):
    function = getattr(attnorm, name)
    rule = attnorm.get_normalizer(name)
    text = " ".join(inspect.getdoc(function).split())
    formula = re.search(r"``(.*?)``", text).group(1).replace("|", "\\|")
    source = re.search(r"Source: (.*?)\.?(?: >>>|$)", text)
    params = ", ".join(
        param.name + ("" if param.default is param.empty else f" = {_shown(param.default)}")
        for param in inspect.signature(function).parameters.values()
        if param.name not in ("logits", "axis", "where", "position")
    )
    return (
        f"`{name}`",
        f"`{formula}`",
        params,
        str(rule.passes),
        ", ".join(implementations_of(rule)),
        source.group(1) if source else "",
    )


def _shown(default):
    return f"{default:g}" if isinstance(default, float) else str(default)


if __name__ == "__main__":
    print(table())
