"""The table of normalisers, from the registry, the docstrings and the measurements."""

import inspect
import json
import re
from pathlib import Path

import pytest

import attnorm
from attnorm import catalogue
from attnorm.attention import implementations_of
from attnorm.bench import contenders, cost
from attnorm.catalogue import table
from attnorm.normalizers import registry
from tests import oracles

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MARK = "<!-- python -m attnorm.catalogue -->\n"


def cells():
    """By name, the cells of its row."""
    lines = [line for line in table().splitlines()[2:] if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0].strip("`"): row[1:] for row in rows}


def test_every_normaliser_has_a_row_with_its_formula_and_source():
    rows = cells()
    assert list(rows) == list(attnorm.normalizer_names())
    for name, (formula, params, passes, implementations, *numbers, source) in rows.items():
        assert re.search(r"\bs(_j)?\b", formula), name
        assert all("=" in param for param in params.split(", ") if param), name
        assert int(passes) >= 1
        assert "reference" in implementations
        assert all(re.fullmatch(r"—|\d+\.\d\d(, \d+\.\d\d)?", number) for number in numbers), name
        assert source, name
    assert rows["lp"][1] == "p = 2"


def test_implementations_are_those_of_every_rule_that_parameters_make():
    for name, row in cells().items():
        shown = {frozenset(text.split(": ")[-1].split(", ")) for text in row[3].split("; ")}
        found = set()
        for _, params in oracles.choices(name):
            rule = attnorm.get_normalizer(name, **oracles.as_arrays(params, heads=4))
            found.add(frozenset(implementations_of(rule)))
        assert found == shown, name


def test_every_normaliser_that_chunked_serves_is_measured():
    measured = {
        name
        for run in json.loads((ROOT / "attnorm" / "bench" / "results" / "cost.json").read_text())["runs"]
        for name in run["ratios"]
    }
    served = {
        name for name in attnorm.normalizer_names() if "chunked" in implementations_of(contenders.rule(name))
    }
    assert not served - measured


def test_costs_are_those_of_the_committed_reports():
    rows, folder = cells(), ROOT / "attnorm" / "bench" / "results"
    measured = {}
    for run in json.loads((folder / "cost.json").read_text())["runs"]:
        measured |= run["ratios"] if run["settings"]["length"] == 2048 else {}
    assert len(measured) > 30 and measured.keys() <= rows.keys()
    for name, by_pass in measured.items():
        assert rows[name][4:6] == [f"{by_pass[way]:.2f}" for way in ("forward", "forward_backward")], name
    reports = [json.loads(path.read_text()) for path in folder.glob("static*.json")]
    reports.sort(key=lambda report: report["date"])
    chips = [report["chips"]["v6e"] for report in reports if "v6e" in report["chips"]]
    counted = [chip for chip in chips if "sink, b per head" in chip][-1]
    ours, l2 = (
        min(x["total"] for x in counted[row]["forward"].values()) for row in ("sink, b per head", "l2")
    )
    assert rows["sink"][7].split(", ")[0] == f"{ours / l2:.2f}"


def test_what_was_not_measured_is_a_dash_and_the_newest_report_counts(tmp_path, monkeypatch):
    def counted(forward, backward):
        passes = {"forward": forward, "backward": backward}
        return {direction: {"512": {"total": 2 * x}, "1024": {"total": x}} for direction, x in passes.items()}

    reports = {
        "static": ("2026-01-01", {"v5e": {"l2": counted(100, 100), "linf": counted(150, 125)}}),
        "static_more": ("2026-02-01", {"v5e": {"l2": counted(10, 10), "lp, p = 3": counted(11, 12)}}),
    }
    for name, (date, chips) in reports.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"date": date, "chips": chips}))
    measured = {"softmax": 1.0, "linf": 1.25}
    runs = [
        {"settings": {"length": length}, "ratios": {name: dict.fromkeys(contenders.PASSES, ratio)}}
        for length, name, ratio in [(2048, name, x) for name, x in measured.items()]
        + [(4096, "entmax15", 3.5)]
    ]
    (tmp_path / "cost.json").write_text(json.dumps(cost.file_of(runs)))
    monkeypatch.setattr(catalogue, "_RESULTS", tmp_path)
    rows = cells()
    assert rows["linf"][4:8] == ["1.25", "1.25", "1.50, 1.25", "—"]
    assert rows["lp"][4:8] == ["—", "—", "1.10, 1.20", "—"]
    assert rows["l2"][6] == "1.00, 1.00" and rows["entmax15"][4:8] == ["—"] * 4
    assert table().endswith("At length 4096 entmax15 takes 3.50 times as long as softmax forward.")


@pytest.mark.parametrize("name", attnorm.normalizer_names())
def test_function_and_rule_have_the_same_parameters_and_defaults(name):
    function = inspect.signature(getattr(attnorm, name)).parameters
    own = {k: x.default for k, x in function.items() if k not in ("logits", "axis", "where", "position")}
    rule = {k: x.default for k, x in inspect.signature(registry._RULES[name]).parameters.items()}
    if name == "lp":  # as a rule it has a default, as a function it asks for p
        assert own.keys() == rule.keys() == {"p"}
    else:
        assert own == rule
    assert all(x.kind is x.KEYWORD_ONLY for k, x in function.items() if k != "logits")


def test_the_readme_shows_this_table():
    assert README.split(MARK)[1].startswith(table() + "\n")
