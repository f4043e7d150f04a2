"""The normalisers as a Markdown table, from registry, docstrings and measurements: ``python -m attnorm.catalogue``."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path

import attnorm
from attnorm.attention import implementations_of
from attnorm.bench import contenders, cost, static_cycles, tpu_kernels

_RESULTS = Path(__file__).parent / "bench" / "results"
_LENGTH, _LONGER = 2048, 4096
_CHIPS = ("v5e", "v6e")
_HEADER = (
    "name",
    "weights",
    "parameters and defaults",
    "passes over the keys",
    "implementations",
    "CPU time, forward",
    "CPU time, forward + backward",
    *(f"{chip} cycles" for chip in _CHIPS),
    "source",
)
_NOT_THERE = "—"


def table() -> str:
    """One row for each normaliser, and what the numbers in it are.

    >>> from attnorm.catalogue import table
    >>> print(table().splitlines()[3][:44])
    | `l2` | `exp(s_j) / sqrt(Σ_k exp(2 s_k))` |
    """
    runs = cost.runs_of(_RESULTS / "cost.json")
    times, cycles = cost.latest(runs, _LENGTH), _cycles()
    rows = [_HEADER, ("---",) * len(_HEADER)]
    rows += [_row(name, times, cycles) for name in attnorm.normalizer_names()]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", _caption(cost.latest(runs, _LONGER))])


def _row(name, times, cycles):
    function = getattr(attnorm, name)
    rule = attnorm.get_normalizer(name)
    text = " ".join((inspect.getdoc(function) or "").split())
    weights = re.search(r"``(.*?)``", text)
    assert weights, f"the docstring of {name} begins with its weights"
    formula = weights[1].replace("|", "\\|")
    source = re.search(r"Source: (.*?)\.?(?: >>>|$)", text)
    params = ", ".join(
        f"{param.name} = {_shown(getattr(rule, param.name) if param.default is param.empty else param.default)}"
        for param in inspect.signature(function).parameters.values()
        if param.name not in ("logits", "axis", "where", "position")
    )
    return (
        f"`{name}`",
        f"`{formula}`",
        params,
        str(rule.passes),
        ", ".join(implementations_of(rule)),
        *(_ratio(times.get(name, {}).get(direction)) for direction in contenders.PASSES),
        *(cycles[chip].get(name, _NOT_THERE) for chip in _CHIPS),
        source.group(1) if source else "",
    )


def _shown(default):
    return f"{default:g}" if isinstance(default, float) else str(default)


def _ratio(number):
    return _NOT_THERE if number is None else f"{number:.2f}"


def _cycles() -> dict[str, dict[str, str]]:
    """By chip and normaliser, the cycles over L2's of the same report, both passes; the newest report counts."""
    reports = [json.loads(path.read_text()) for path in _RESULTS.glob("static*.json")]
    found: dict[str, dict[str, str]] = {chip: {} for chip in _CHIPS}
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
                    found[chip][name] = ", ".join(
                        _ratio(ours / theirs if ours and theirs else None)
                        for ours, theirs in zip(*totals, strict=True)
                    )
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


if __name__ == "__main__":
    print(table())
