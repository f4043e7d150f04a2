"""What each normaliser costs in comparison with softmax, in the O(T)-memory attention, in one process."""

from __future__ import annotations

import dataclasses
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import jax
from jax.extend.core import subjaxprs

from attnorm.attention import implementations_of
from attnorm.bench import contenders, report
from attnorm.bench.contenders import PASSES, Case
from attnorm.normalizers import Normalizer

KIND = "measured cost of normalisers on cpu"
BASELINE = "softmax"
# The most that a rule of one exponential and one numerator may take, and entmax-1.5 forward at its length.
_ONE_EXPONENTIAL = 1.3
_ENTMAX, _ENTMAX_LENGTH = 4.0, 4096
# What a rule may have to do beside one numerator, and functions of a logit that take long: of these it may have one
# exponential.
_MORE_NUMERATORS = {"numerators", "rows", "level"}
_EXPONENTIALS = {"exp", "exp2", "logistic"}
_LONG = _EXPONENTIALS | {"expm1", "log", "log1p", "tanh", "pow", "erf", "erfc"}


def run(
    normalizers: Sequence[str], length: int, dtype: str, rounds: int, progress: Callable[[str], None]
) -> dict:
    """The report: by normaliser and pass the time over softmax's of the same round, medians over rounds."""
    result = report.new_report(
        KIND,
        implementation="chunked",
        length=length,
        dtype=dtype,
        rounds=rounds,
    )
    served = [name for name in normalizers if "chunked" in implementations_of(contenders.rule(name))]
    result |= {"ratios": {}, "not_served": [name for name in normalizers if name not in served]}
    for direction in PASSES:
        case = Case("cpu", length, dtype, direction)
        runs = {}
        for name in dict.fromkeys([BASELINE, *served]):
            progress(f"{case}: preparing {name}")
            runs[name], _ = contenders.prepare(f"chunked {name}", case, threads=None)
            _seconds(runs[name])
        progress(f"{case}: {rounds} rounds")
        for name, ratio in ratios(runs, rounds).items():
            result["ratios"].setdefault(name, {})[direction] = ratio
    result["bars"] = [dataclasses.asdict(bar) for bar in bars(result["ratios"], length)]
    return result


def ratios(runs: dict[str, Callable], rounds: int) -> dict[str, float]:
    """The median over rounds of each time over the baseline's; every second round goes backwards."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        for name in runs if number % 2 == 0 else reversed(runs):
            times[name].append(_seconds(runs[name]))
    base = times[BASELINE]
    return {
        name: statistics.median(ours / theirs for ours, theirs in zip(own, base, strict=True))
        for name, own in times.items()
    }


def _seconds(call):
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def bars(by_normalizer: dict[str, dict[str, float]], length: int) -> list[report.Bar]:
    """The ratios that are bounded: of rules with one exponential and one numerator, and of entmax-1.5 at its length."""
    result = []
    for name, by_pass in by_normalizer.items():
        if name != BASELINE and has_one_exponential(contenders.rule(name)):
            for direction, ratio in by_pass.items():
                result.append(report.Bar(f"{direction}, {name} / {BASELINE}", ratio, _ONE_EXPONENTIAL))
    if length == _ENTMAX_LENGTH and "entmax15" in by_normalizer:
        ratio = by_normalizer["entmax15"]["forward"]
        result.append(report.Bar(f"forward, entmax15 / {BASELINE} at length {length}", ratio, _ENTMAX))
    return result


def has_one_exponential(rule: Normalizer) -> bool:
    """Whether the terms of a logit take one exponential at most, and make one numerator.

    >>> import attnorm
    >>> from attnorm.bench.cost import has_one_exponential
    >>> [has_one_exponential(attnorm.get_normalizer(name)) for name in ("sigmoid", "softplus", "affine")]
    [True, False, False]
    """
    if rule.needs & _MORE_NUMERATORS:
        return False
    program = jax.make_jaxpr(lambda s, m, rule: rule.terms(s, m))(0.0, 0.0, rule)
    taken = _long_functions(program.jaxpr)
    return len(taken) <= 1 and set(taken) <= _EXPONENTIALS


def _long_functions(jaxpr) -> list[str]:
    own = [equation.primitive.name for equation in jaxpr.eqns]
    return [name for name in own if name in _LONG] + [
        name for inner in subjaxprs(jaxpr) for name in _long_functions(inner)
    ]


def runs_of(path: Path) -> list[dict]:
    """The reports in a file, the oldest first; none where it is missing or empty.

    Raises:
      ValueError: the file holds something else.
    """
    text = path.read_text() if path.exists() else ""
    if not text:
        return []
    wrong = f"{path} holds no reports of costs, to which another could be added"
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(wrong) from error
    if not isinstance(found, dict) or found.get("kind") != KIND or "runs" not in found:
        raise ValueError(wrong)
    return found["runs"]


def file_of(runs: Iterable[dict]) -> dict:
    """What :func:`runs_of` reads."""
    return {"kind": KIND, "runs": list(runs)}


def latest(runs: Iterable[dict], length: int) -> dict[str, dict[str, float]]:
    """The ratios at one length by normaliser and pass; where one was measured again, the last."""
    found: dict[str, dict[str, float]] = {}
    for result in runs:
        if result["settings"]["length"] == length:
            found |= result["ratios"]
    return found


def text(result: dict) -> str:
    """The report as a table."""
    rows = [["", *PASSES]]
    for name, by_pass in result["ratios"].items():
        rows.append([name, *(f"{by_pass[direction]:.2f}" for direction in PASSES)])
    settings = result["settings"]
    title = f"\nTime over softmax's, chunked, {settings['dtype']}, length {settings['length']}"
    bars = [str(report.Bar(**bar)) for bar in result["bars"]]
    not_served = f"  not served by chunked: {', '.join(result['not_served']) or 'none'}"
    return "\n".join([report.table(title, rows), not_served, *bars])
