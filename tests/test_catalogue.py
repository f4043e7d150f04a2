"""The tables of normalisers, from the registry, the docstrings and the measurements.

What is asked of each is tested by its name, so that ``-k NAME`` says what a new one still lacks.
"""

import functools
import inspect
import json
import re
from pathlib import Path

import pytest

import attnorm
from attnorm import catalogue
from attnorm.attention import implementations_of
from attnorm.bench import contenders, cost
from attnorm.catalogue import costs, table
from attnorm.normalizers import registry
from tests import oracles

ROOT = Path(__file__).parents[1]
# Their formula comes from elsewhere than their source, as their docstrings say in other words.
UNCHECKED = "critical scale_invariant affine reluformer polynomial stieltjes asentmax elastic".split()


NAMES = pytest.mark.parametrize("name", attnorm.normalizer_names())


def cells(markdown):
    """By name, the cells of its row, the first with its mark."""
    lines = [line for line in markdown.splitlines()[2:] if line.startswith("|")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return {row[0].split("`")[1]: row for row in rows}


@functools.cache
def rows_of(made):
    """Those of one table, made once for all names."""
    return cells(made())


@NAMES
def test_it_has_a_row_with_its_formula_and_source(name):
    _, formula, params, source = rows_of(table)[name]
    rule = attnorm.get_normalizer(name)
    assert re.search(r"\bs(_j)?\b", formula)
    names = [param.partition(" = ")[0] for param in params.split(", ") if param]
    learned = {param.strip("*") for param in names if param.startswith("**")}
    assert learned == set(rule.learned) & {param.strip("*") for param in names}
    assert len(names) == len(inspect.signature(registry._RULES[name]).parameters)
    assert source, f"the docstring of attnorm.{name} wants a line that begins with Source:"
    doc = getattr(attnorm, name).__doc__
    assert set(re.findall(r"\[(.*?)\]", source)) == set(
        re.findall(r"arXiv (\d[\d.]*\d)", doc.partition("Source:")[2])
    )
    assert source.endswith("†") or not ("be checked" in doc or name in UNCHECKED)


def test_rows_stand_in_the_order_of_the_registry_and_show_what_is_known():
    rows = rows_of(table)
    assert list(rows) == list(attnorm.normalizer_names())
    assert not [name for name in ("l2", "yarn", "sigmoid", "entmax") if "†" in rows[name][3]]
    assert rows["lp"][2] == "**p** = 2" and rows["yarn"][2] == "r = 1"


@NAMES
def test_its_mark_is_that_of_every_rule_that_parameters_make(name):
    meanings = {"": {0}, "●": {2}, "◐": {0, 2}}
    found = set()
    for _, params in oracles.choices(name):
        served = implementations_of(attnorm.get_normalizer(name, **oracles.as_arrays(params, heads=4)))
        assert {"reference", "chunked"} <= set(served)
        found.add(len({"pallas_tpu", "pallas_gpu"} & set(served)))
    assert found == meanings[rows_of(table)[name][0].rpartition("`")[2].strip()]


@NAMES
def test_it_is_measured_if_chunked_serves_it(name):
    runs = json.loads((ROOT / "attnorm" / "bench" / "results" / "cost.json").read_text())["runs"]
    measured = {name for run in runs for name in run["ratios"] if run["settings"]["length"] == 2048}
    assert name in measured or "chunked" not in implementations_of(contenders.rule(name)), (
        f"{name} is not measured: on idle cores, python -m attnorm.bench --cost --normalizers {name} "
        "--out attnorm/bench/results/cost.json"
    )


def test_costs_are_those_of_the_committed_reports():
    rows, folder = cells(costs()), ROOT / "attnorm" / "bench" / "results"
    measured, made = {}, {}
    for run in json.loads((folder / "cost.json").read_text())["runs"]:
        if run["settings"]["length"] == 2048:
            measured |= run["ratios"]
            made |= dict.fromkeys(run["ratios"], f"{run['date'][:10]}, {run['versions']['jax']}")
    assert len(measured) > 30 and list(rows) == list(attnorm.normalizer_names())
    for name, by_pass in measured.items():
        assert int(rows[name][1]) >= 1
        assert rows[name][4] == made[name], name
        assert rows[name][2:4] == [f"{by_pass[way]:.2f}" for way in ("forward", "forward_backward")], name
    reports = [json.loads(path.read_text()) for path in folder.glob("static*.json")]
    reports.sort(key=lambda report: report["date"])
    chips = [report["chips"]["v6e"] for report in reports if "v6e" in report["chips"]]
    counted = [chip for chip in chips if "sink, b per head" in chip][-1]
    ours, l2 = (
        min(x["total"] for x in counted[row]["forward"].values()) for row in ("sink, b per head", "l2")
    )
    assert rows["sink"][6].split(", ")[0] == f"{ours / l2:.2f}"
    last = [report for report in reports if "v6e" in report["chips"]][-1]
    assert rows["softmax_plus_n"][7] == f"{last['date'][:10]}, {last['versions']['jax']}"


def test_what_was_not_measured_is_a_dash_and_the_newest_report_counts(tmp_path, monkeypatch):
    def counted(forward, backward):
        passes = {"forward": forward, "backward": backward}
        return {direction: {"512": {"total": 2 * x}, "1024": {"total": x}} for direction, x in passes.items()}

    reports = {
        "static": ("2026-01-01", {"v5e": {"l2": counted(100, 100), "linf": counted(150, 125)}}),
        "static_more": ("2026-02-01", {"v5e": {"l2": counted(10, 10), "lp, p = 3": counted(11, 12)}}),
    }
    for name, (date, chips) in reports.items():
        report = {"date": date, "chips": chips, "versions": {"jax": "0.12.0"}}
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    measured = {"softmax": 1.0, "linf": 1.25}
    runs = [
        {
            "date": "2026-03-01T12:00",
            "versions": {"jax": "0.11.0"},
            "settings": {"length": length},
            "ratios": {name: dict.fromkeys(contenders.PASSES, ratio)},
        }
        for length, name, ratio in [(2048, name, x) for name, x in measured.items()]
        + [(4096, "entmax15", 3.5)]
    ]
    (tmp_path / "cost.json").write_text(json.dumps(cost.file_of(runs)))
    monkeypatch.setattr(catalogue, "_RESULTS", tmp_path)
    rows = cells(costs())
    assert rows["linf"][2:] == ["1.25", "1.25", "2026-03-01, 0.11.0", "1.50, 1.25", "—", "2026-01-01, 0.12.0"]
    assert rows["lp"][2:] == ["—", "—", "—", "1.10, 1.20", "—", "2026-02-01, 0.12.0"]
    assert rows["l2"][5] == "1.00, 1.00" and rows["entmax15"][2:] == ["—"] * 6
    assert costs().endswith("At length 4096 entmax15 takes 3.50 times as long as softmax forward.")


@NAMES
def test_function_and_rule_have_the_same_parameters_and_defaults(name):
    function = inspect.signature(getattr(attnorm, name)).parameters
    own = {k: x.default for k, x in function.items() if k not in ("logits", "axis", "where", "position")}
    rule = {k: x.default for k, x in inspect.signature(registry._RULES[name]).parameters.items()}
    if name == "lp":  # as a rule it has a default, as a function it asks for p
        assert own.keys() == rule.keys() == {"p"}
    else:
        assert own == rule
    assert all(x.kind is x.KEYWORD_ONLY for k, x in function.items() if k != "logits")


def test_all_texts_on_adding_a_normaliser_ask_for_the_same():
    readme = (ROOT / "README.md").read_text().partition("\n## Add a normaliser")[2].partition("\n## ")[0]
    notebook = (ROOT / "notebooks" / "06_write_your_own_normalizer.ipynb").read_text()
    for text in (readme, registry.__doc__, notebook.partition("## In the package")[2]):
        for asked in (
            "parameters",
            "docstring",
            "double",
            "Source:",
            "__init__.py",
            "__all__",
            "FORMULAS",
            "tests/oracles.py",
            "python -m attnorm.catalogue",
            "--costs",
            "attnorm/bench/README.md",
        ):
            assert asked in text, asked


TABLES = pytest.mark.parametrize(
    ("path", "arguments", "made"),
    [("README.md", "", table), ("attnorm/bench/README.md", " --costs", costs)],
    ids=["formulas", "costs"],
)


def committed(path, arguments):
    """What follows the comment that says where a table comes from."""
    return (ROOT / path).read_text().split(f"<!-- python -m attnorm.catalogue{arguments} -->\n")[1]


@TABLES
def test_the_committed_tables_are_these(path, arguments, made):
    assert committed(path, arguments).startswith(made() + "\n")


@NAMES
@TABLES
def test_the_committed_tables_have_its_row(name, path, arguments, made):
    row = cells(committed(path, arguments).partition("\n\n")[0]).get(name)
    assert row == rows_of(made)[name], (
        f"{path} has another row for {name}, or none: put there what "
        f"`python -m attnorm.catalogue{arguments}` prints"
    )
