"""The normalisers as Markdown tables, from registry, docstrings and measurements: ``python -m attnorm.catalogue``."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from pathlib import Path
from typing import Any

import attnorm
from attnorm.attention import implementations_of
from attnorm.bench import contenders, cost, static_cycles, tpu_kernels

_RESULTS = Path(__file__).parent / "bench" / "results"
_LENGTH, _LONGER = 2048, 4096
_CHIPS = ("v5e", "v6e")
_NOT_THERE = "—"
# Parameters by which a normaliser becomes another rule, which other implementations serve than its default.
_OTHER_RULES: dict[str, dict[str, Any]] = {"sigmoid": {"b": 0.0}, "general": {"F": "gelu"}}
_FUSED, _PARTLY_FUSED, _UNCHECKED = "●", "◐", "†"
# How a docstring says that the source itself was not at hand.
_UNCHECKED_WORDS = r"could (not )?be checked|summaries|secondary|notes on|code that follows"


def table() -> str:
    """What each normaliser is: the table of the README.

    >>> from attnorm.catalogue import table
    >>> print(table().splitlines()[3][:46])
    | `l2` ● | `exp(s_j) / sqrt(Σ_k exp(2 s_k))` |
    """
    rows = [_row(name) for name in attnorm.normalizer_names()]
    caption = (
        f"{_FUSED}: with fused kernels for TPU and GPU; {_PARTLY_FUSED}: with them only for `sigmoid` with `b`, and "
        "for `general` without `F = gelu`; all others by `reference` and `chunked`, which serve every normaliser. "
        "Bold: parameters that `NormalizedAttention` can learn. "
        f"{_UNCHECKED}: the docstring says what could not be checked in the source. Numbers are those of arXiv. "
        "What each costs: [`attnorm/bench/README.md`](attnorm/bench/README.md)."
    )
    return _markdown(("name", "weights", "parameters and defaults", "source"), rows, caption)


def costs() -> str:
    """What each normaliser costs, on CPU and counted for TPU: the table of attnorm/bench/README.md.

    >>> from attnorm.catalogue import costs
    >>> print(costs().splitlines()[2][:31])
    | `softmax` | 1 | 1.00 | 1.00 |
    """
    runs = cost.runs_of(_RESULTS / "cost.json")
    measured: dict[str, tuple[dict[str, float], str]] = {}
    for run in runs:
        if run["settings"]["length"] == _LENGTH:
            measured |= {name: (ratios, _made(run)) for name, ratios in run["ratios"].items()}
    counted = _cycles()
    rows = []
    for name in attnorm.normalizer_names():
        ratios, when = measured.get(name, ({}, _NOT_THERE))
        cycles = counted.get(name, {})
        rows.append(
            (
                f"`{name}`",
                str(attnorm.get_normalizer(name).passes),
                *(_ratio(ratios.get(direction)) for direction in contenders.PASSES),
                when,
                *(cycles.get(chip, (_NOT_THERE, ""))[0] for chip in _CHIPS),
                "; ".join(dict.fromkeys(made for _, made in cycles.values())) or _NOT_THERE,
            )
        )
    header = (
        "name",
        "passes over the keys",
        "CPU, forward",
        "CPU, forward + backward",
        "measured, with JAX",
        *_CHIPS,
        "counted, with JAX",
    )
    return _markdown(header, rows, _caption(cost.latest(runs, _LONGER)))


def _markdown(header, rows, caption):
    lines = [f"| {' | '.join(row)} |" for row in (header, ("---",) * len(header), *rows)]
    return "\n".join([*lines, "", caption])


def _row(name):
    function = getattr(attnorm, name)
    rule = attnorm.get_normalizer(name)
    text = " ".join((inspect.getdoc(function) or "").split())
    weights = re.search(r"``(.*?)``", text)
    assert weights, f"the docstring of {name} wants its weights in double backticks"
    formula = weights[1].replace("|", "\\|")
    source = re.search(r"Source: (.*?)\.?(?: >>>|$)", text)
    params = ", ".join(
        f"{f'**{param.name}**' if param.name in rule.learned else param.name} = "
        f"{_shown(getattr(rule, param.name) if param.default is param.empty else param.default)}"
        for param in inspect.signature(function).parameters.values()
        if param.name not in ("logits", "axis", "where", "position")
    )
    return (
        f"`{name}`{_mark(name)}",
        f"`{formula}`",
        params,
        _short(source.group(1)) if source else "",
    )


def _mark(name: str) -> str:
    rules = [attnorm.get_normalizer(name, **params) for params in ({}, _OTHER_RULES.get(name, {}))]
    fused = [{"pallas_tpu", "pallas_gpu"} <= set(implementations_of(rule)) for rule in rules]
    return f" {_FUSED if all(fused) else _PARTLY_FUSED}" if any(fused) else ""


def _short(source: str) -> str:
    """The numbers of arXiv in it; without one, what comes before a semicolon."""
    numbers = dict.fromkeys(re.findall(r"arXiv (\d{4}\.\d{4,5})", source))
    links = ", ".join(f"[{number}](https://arxiv.org/abs/{number})" for number in numbers)
    mark = f" {_UNCHECKED}" if re.search(_UNCHECKED_WORDS, source) else ""
    return (links or source.partition(";")[0]) + mark


def _shown(default):
    return f"{default:g}" if isinstance(default, float) else str(default)


def _ratio(number):
    return _NOT_THERE if number is None else f"{number:.2f}"


def _made(report: dict) -> str:
    return f"{report['date'][:10]}, {report['versions']['jax']}"


def _cycles() -> dict[str, dict[str, tuple[str, str]]]:
    """By normaliser and chip, the cycles over L2's of the same report, both passes, and when; the newest report counts."""
    reports = [json.loads(path.read_text()) for path in _RESULTS.glob("static*.json")]
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for report in sorted(reports, key=lambda report: report["date"]):
        for chip in _CHIPS:
            counted = report["chips"].get(chip, {})
            for name in attnorm.normalizer_names():
                row = next((row for row in tpu_kernels.rows([name]) if row in counted), None)
                if row is not None:
                    totals = [
                        [static_cycles.best(counted, which, direction) for direction in static_cycles.PASSES]
                        for which in (row, "l2")
                    ]
                    ratios = [
                        _ratio(ours / theirs if ours and theirs else None)
                        for ours, theirs in zip(*totals, strict=True)
                    ]
                    found.setdefault(name, {})[chip] = (", ".join(ratios), _made(report))
    return found


def _caption(longer):
    settings = ", ".join(
        f"{name} with {param} = {value:g}"
        for name, params in contenders.PARAMS.items()
        for param, value in params.items()
    )
    text = (
        f"CPU: time over softmax's, by `chunked`, causal, float32, length {_LENGTH}, {settings}. {', '.join(_CHIPS)}: "
        "cycles of the TPU kernels over L2's, forward and backward, counted by a compiler and not measured, "
        f"{settings}, sink with one b per head. {_NOT_THERE}: not served, or not measured."
    )
    if "entmax15" in longer:
        ratio = _ratio(longer["entmax15"]["forward"])
        text += f" At length {_LONGER} entmax15 takes {ratio} times as long as softmax forward."
    return text


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attnorm.catalogue", description="Prints a table of all normalisers, in Markdown."
    )
    parser.add_argument("--costs", action="store_true", help="what each costs, instead of what each is")
    return parser


if __name__ == "__main__":
    print(costs() if _parser().parse_args().costs else table())
