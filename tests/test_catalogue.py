"""The table of normalisers, from the registry and the docstrings."""

import inspect
import re
from pathlib import Path

import pytest

import attnorm
from attnorm.catalogue import table
from attnorm.normalizers import registry

README = (Path(__file__).parents[1] / "README.md").read_text()
MARK = "<!-- python -m attnorm.catalogue -->\n"


def test_every_normaliser_has_a_row_with_its_formula_and_source():
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in table().splitlines()[2:]]
    assert [row[0].strip(" `") for row in rows] == list(attnorm.normalizer_names())
    for name, formula, _, passes, implementations, source in rows:
        assert re.search(r"\bs(_j)?\b", formula), name
        assert int(passes) >= 1
        assert "reference" in implementations
        assert bool(source.strip()) == (name.strip(" `") not in ("softmax", "linf")), name


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
