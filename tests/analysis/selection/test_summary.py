"""Verdicts: each claim is called false where the table makes it false, and true where it makes it true."""

import math

import pytest

from attnorm.analysis.selection.summary import as_text, summarize

DISTANCE = dict(
    normalizer="l2", length=64, num_selected=1, layer=0, head=0,
    distance=2.0, bound=2.5, expected=1.0, expected_low=0.9, expected_high=1.1, expected_ceiling=3.0,
)  # fmt: skip
CRITICAL = dict(normalizer="l2", length=100, num_selected=6, is_critical=1)
SEPARABILITY = dict(
    normalizer="l2", num_selected=1, recall=1.0, low=0.1, paper_high=1.0, high=1.0
)  # fmt: skip
GRADIENT = dict(
    normalizer="l2", step=1e-3, temperature=1.0, difference=0.1, difference_largest=0.2, response_ratio=0.3,
    spectral=0.3, spectral_largest=0.2, paper_bound=0.25, proved_bound=0.7, spectral_bound=0.7,
)  # fmt: skip


def true_tables():
    return {
        "2a": [DISTANCE, DISTANCE | dict(length=128, expected=1.05)],
        "2b": [DISTANCE, DISTANCE | dict(num_selected=5, distance=1.0)],
        "2c": [CRITICAL],
        "3": [SEPARABILITY, SEPARABILITY | dict(num_selected=20, recall=0.8)],
        "4": [
            GRADIENT
            | dict(
                temperature=T, paper_bound=min(0.25 / T, 2**0.5), proved_bound=0.7 / T, spectral_bound=0.7 / T
            )
            | dict(difference=0.1 / T, difference_largest=0.2 / T, spectral=0.3 / T, spectral_largest=0.2)
            for T in (0.01, 0.05, 1.0)
        ],
    }


def verdicts(tables):
    return {(row["figure"], row["claim"]): row["verdict"] for row in summarize(tables, {"l2": False})}


def test_claims_that_are_true():
    assert set(verdicts(true_tables()).values()) == {"holds"}


@pytest.mark.parametrize(
    ("figure", "change", "claim"),
    [
        ("2a", dict(bound=1.9), "Theorem 1.1 as proved"),
        ("2a", dict(expected_low=1.2), "Theorem 1.2 as proved"),
        ("2a", dict(expected_high=0.98), "Theorem 1.2 as proved"),
        ("2a", dict(expected_ceiling=0.9), "E d̃ <="),
        ("2b", dict(distance=3.0), "d̃ collapses"),
        ("2b", dict(bound=0.9), "Theorem 1.1 as proved"),
        ("2c", dict(num_selected=20), "the critical N"),
        ("2c", dict(is_critical=0), "the critical N"),
        ("3", dict(recall=0.6), "N_s/N falls"),
        ("3", dict(recall=0.9), "N_s/N falls"),
        ("3", dict(low=0.85), "Theorem 2, lower side"),
        ("3", dict(paper_high=0.7), "Theorem 2, upper side"),
        ("3", dict(high=0.7), "Theorem 2, upper side as proved"),
        ("4", dict(difference=1e-6), "g is about 100 times smaller"),
        ("4", dict(spectral_largest=0.3), "Corollary 3"),
        ("4", dict(spectral_largest=0.8), "‖J‖₂ <= C_p/T"),
        ("4", dict(difference_largest=0.8), "‖J‖₂ <= C_p/T"),
    ],
)
def test_claims_that_are_false(figure, change, claim):
    tables = true_tables()
    tables[figure] = [*tables[figure][:-1], tables[figure][-1] | change]
    false = [
        claim
        for (at, claim), verdict in verdicts(tables).items()
        if at == figure and verdict == "does not hold"
    ]
    assert any(found.startswith(claim) for found in false), false


def test_growth_and_slopes_are_fitted():
    tables = true_tables()
    tables["2a"] = [
        DISTANCE | dict(length=L, expected=L / 64, expected_low=0.1, expected_high=99) for L in (64, 256)
    ]
    tables["4"] = [row | dict(difference=0.1) for row in tables["4"]]
    rows = {row["claim"]: row for row in summarize(tables, {"l2": False})}
    growth = rows["E d̃ <= (1 + N) Σα max‖x‖: at fixed N it grows with Σα, not with L"]
    assert growth["verdict"] == "does not hold" and "L^1.00" in growth["measured"]
    assert "over its ceiling: 1.333" in growth["measured"]
    flat = rows["g grows like 1/T below T = 0.1"]
    assert flat["verdict"] == "does not hold" and "T^" in flat["measured"]
    direction = "a random direction does not measure ‖J‖₂ (here: half of it or less)"
    assert rows[direction]["verdict"] == "holds" and rows[direction]["measured"].endswith("down to 0.300")
    tables["4"] = [row | dict(response_ratio=0.6) for row in tables["4"]]
    assert verdicts(tables)["4", direction] == "does not hold"


def test_claims_are_the_papers_only_where_it_makes_them():
    for in_scope, origin in ((True, "paper"), (False, "paper's form, beyond its scope")):
        origins = {row["claim"]: row["from"] for row in summarize(true_tables(), {"l2": in_scope})}
        assert origins["Theorem 2, lower side"] == origin
        assert origins["Theorem 1.1 as proved: d̃ stays below its bound"] == "ours"
        assert set(origins.values()) == {origin, "ours"}


def test_a_bound_that_says_nothing_is_told():
    tables = true_tables()
    tables["3"] = [
        row | dict(paper_high=0.9, high=high) for row, high in zip(tables["3"], (1.0, 0.99995), strict=True)
    ]
    measured = {row["claim"]: row["measured"] for row in summarize(tables, {"l2": False})}
    assert measured["Theorem 2, upper side"].endswith("below 1 for 100%")
    assert measured["Theorem 2, upper side as proved (for independent uniform x)"].endswith("below 1 for 0%")


def test_what_cannot_be_judged_is_not():
    tables = true_tables()
    tables["2c"] = [CRITICAL | dict(is_critical=math.nan)]
    tables["4"] = [row | dict(proved_bound=math.nan, spectral_bound=math.nan) for row in tables["4"][-1:]]
    tables["3"] = [row | dict(low=math.nan, high=math.nan, paper_high=math.nan) for row in tables["3"]]
    tables["2a"][1]["bound"] = math.nan
    found = verdicts(tables)
    assert [at for at, verdict in found.items() if at[0] in ("2a", "3") and verdict == "not judged"] == [
        ("2a", "Theorem 1.1 as proved: d̃ stays below its bound"),
        ("3", "Theorem 2, lower side"),
        ("3", "Theorem 2, upper side"),
        ("3", "Theorem 2, upper side as proved (for independent uniform x)"),
    ]
    assert found["4", "‖J‖₂ <= C_p/T and g <= min(C_p/T, D_p/ε)"] == "not judged"
    assert found["4", "g grows like 1/T below T = 0.1"] == "not judged"
    assert found["2c", "the critical N is about 0.06 L (here: from 0.03 to 0.12)"] == "not judged"
    tables = true_tables()
    tables["2b"], tables["3"] = tables["2b"][:1], tables["3"][:1]
    tables["4"] = [row | dict(response_ratio=math.nan) for row in tables["4"]]
    found = verdicts(tables)
    assert found["2b", "d̃ collapses as N grows at fixed L"] == "not judged"
    assert found["3", "N_s/N falls until N ≈ 16 and then stays in 0.70-0.85"] == "not judged"
    assert found["4", "a random direction does not measure ‖J‖₂ (here: half of it or less)"] == "not judged"
    tables["3"] = true_tables()["3"][1:]
    assert verdicts(tables)["3", "N_s/N falls until N ≈ 16 and then stays in 0.70-0.85"] == "not judged"


def test_text_is_a_table_with_every_claim():
    summary = summarize(true_tables(), {"l2": False})
    text = as_text(summary, "a model").splitlines()
    assert text[0] == "a model" and len(text) == 4 + len(summary)
    assert all(line.count("|") == 7 for line in text[2:])
