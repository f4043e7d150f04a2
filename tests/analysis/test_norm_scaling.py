"""The scaling figure: its closed forms against dense Jacobians, its published values, and its command."""

import csv
import math
import subprocess
import sys

import jax
import numpy as np
import pytest

from attnorm import lp, theory
from attnorm.analysis.__main__ import main
from attnorm.analysis.norm_scaling import (
    PATTERNS,
    TwoLevelWeights,
    equal_logits_rows,
    logit_for_top_sum,
    scaling_rows,
)

FILES = [
    "norm_scaling.csv",
    "norm_scaling.png",
    "norm_scaling_equal_logits.csv",
    "norm_scaling_equal_logits.png",
]


@pytest.fixture(scope="module")
def lines():
    """The rows of one line of the figure, by (p, pattern)."""
    rows = scaling_rows()
    return {
        (p, name): [r for r in rows if (r["p"], r["pattern"]) == (p, name)]
        for p in (1, 2)
        for name in PATTERNS
    }


@pytest.mark.parametrize("p", (1, 2))
@pytest.mark.parametrize(("num_keys", "num_top"), [(10, 1), (10, 9), (10, 10), (24, 4), (2, 1), (1, 1)])
def test_closed_forms_equal_the_dense_weights(num_keys, num_top, p):
    pattern = TwoLevelWeights(num_keys, num_top, 1.7, p)
    with jax.enable_x64(True):
        logits = np.where(np.arange(num_keys) < num_top, 1.7, 0.0)
        y = lp(logits, p=p)
        expected = {
            "top_sum": y[:num_top].sum(),
            "l2_norm": np.linalg.norm(y),
            "jacobian_frobenius": theory.jacobian_frobenius_norm(y, p),
            "jacobian_spectral": theory.jacobian_spectral_norm(y, p),
        }
        assert float(y[0]) == pytest.approx(pattern.top, rel=1e-13)
        assert num_top == num_keys or float(y[-1]) == pytest.approx(pattern.rest, rel=1e-13)
        for name, value in expected.items():
            assert getattr(pattern, name) == pytest.approx(float(value), rel=1e-12, abs=1e-12), name


def test_top_weights_sum_to_the_target_or_the_row_is_marked(lines):
    for (p, name), line in lines.items():
        for row in line:
            N, k = row["num_keys"], row["num_top"]
            if p == 1:
                below_the_floor = k == N or 19 * (N - k) / k < math.exp(2)
                assert (
                    row["logit"] == 2 if below_the_floor else row["top_sum"] == pytest.approx(0.95, abs=1e-12)
                )
                assert not row["at_zero"]
            else:
                assert row["at_zero"] == (k / math.sqrt(N) >= 0.95) == (row["logit"] == 0), (name, N)
                assert row["at_zero"] or row["top_sum"] == pytest.approx(0.95, abs=1e-12)


def test_uniform_pattern_is_marked_where_no_logit_reaches_the_target(lines):
    assert [r["num_keys"] for r in lines[2, "top-10"] if r["at_zero"]] == [
        r["num_keys"] for r in lines[2, "top-10"] if r["num_keys"] <= 110
    ]
    marked = [r["at_zero"] for r in lines[2, "top-√N"]]
    assert sum(marked) > 50 and not all(marked)
    assert not any(r["at_zero"] for r in lines[2, "one-hot"])


def test_lengths_are_64_from_10_to_a_million(lines):
    for line in lines.values():
        lengths = [r["num_keys"] for r in line]
        assert len(set(lengths)) == 64 and lengths == sorted(lengths)
        assert lengths[0] == 10 and lengths[-1] == 10**6


@pytest.mark.parametrize(
    ("p", "pattern", "quantity", "first", "last"),
    [
        (1, "one-hot", "l2_norm", 0.95, 0.95),
        (1, "top-10", "l2_norm", 0.316, 0.300),
        (1, "top-√N", "l2_norm", 0.549, 0.030),
        (1, "uniform", "l2_norm", 10**-0.5, 1e-3),
        (1, "one-hot", "jacobian_frobenius", 0.055, 0.0475),
        (1, "top-10", "jacobian_frobenius", 0.300, 0.285),
        (1, "top-√N", "jacobian_frobenius", 0.449, 0.030),
        (1, "uniform", "jacobian_frobenius", 0.30, 0.001),
        (2, "one-hot", "jacobian_frobenius", 0.43, 0.43),
        (2, "top-10", "jacobian_frobenius", 0.95, 1),
        (2, "top-√N", "jacobian_frobenius", 0.95, 1),
        (2, "uniform", "jacobian_frobenius", 0.95, 1),
        (1, "uniform", "jacobian_spectral", 1e-1, 1e-6),
        (2, "uniform", "jacobian_spectral", 10**-0.5, 1e-3),
    ],
)
def test_published_values(lines, p, pattern, quantity, first, last):
    line = [r[quantity] for r in lines[p, pattern]]
    assert line[0] == pytest.approx(first, rel=0.01)
    assert line[-1] == pytest.approx(last, rel=0.01)


def test_constant_lines(lines):
    for pattern in PATTERNS:
        np.testing.assert_allclose([r["l2_norm"] for r in lines[2, pattern]], 1, rtol=1e-12)
    beyond_the_floor = [r for r in lines[1, "top-10"] if r["num_keys"] > 13]
    np.testing.assert_allclose([r["l2_norm"] for r in beyond_the_floor], 0.300, atol=0.005)
    np.testing.assert_allclose([r["jacobian_frobenius"] for r in beyond_the_floor], 0.285, atol=0.002)


def test_equal_logits_values():
    logit = logit_for_top_sum(10_000, 1, 1)
    assert logit == pytest.approx(12.155, abs=5e-4)
    (l1, l2) = (row for row in equal_logits_rows() if row["pattern"] == "one-hot" and row["logit"] == logit)
    assert (l1["p"], l2["p"]) == (1, 2) and l1["num_keys"] == l2["num_keys"] == 10_000
    assert l1["jacobian_frobenius"] == pytest.approx(0.0475, rel=1e-3)
    assert l2["jacobian_frobenius"] == pytest.approx(7.4e-4, rel=0.01)


def test_two_figures_and_two_tables_are_written(tmp_path):
    stale = tmp_path / "new" / "norm_scaling.csv"
    stale.parent.mkdir()
    stale.write_text("old")
    assert main(["norm-scaling", "--out", str(tmp_path / "new")]) == 0
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == FILES
    with open(stale, newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == 2 * 4 * 64
    rows = scaling_rows()
    assert [float(r["jacobian_frobenius"]) for r in table] == [r["jacobian_frobenius"] for r in rows]
    assert [r["at_zero"] for r in table] == [str(r["at_zero"]) for r in rows]
    for name in FILES[1::2]:
        content = (tmp_path / "new" / name).read_bytes()
        assert content.startswith(b"\x89PNG\r\n") and len(content) > 20_000


def test_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "norm_scaling.csv").write_text("old")

    def full(self, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr("pathlib.Path.replace", full)
    assert main(["norm-scaling", "--out", str(tmp_path)]) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["norm_scaling.csv"]
    assert (tmp_path / "norm_scaling.csv").read_text() == "old"


def test_output_that_cannot_be_a_folder_is_named(tmp_path, capsys):
    (tmp_path / "file").write_text("mine")
    assert main(["norm-scaling", "--out", str(tmp_path / "file" / "deeper")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: cannot read or write") and str(tmp_path / "file") in error
    assert main(["norm-scaling", "--out", str(tmp_path / "file")]) == 1
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("arguments", ([], ["norm-scaling"], ["norm-scalin", "--out", "x"]))
def test_bad_command_lines_show_the_usage(arguments, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: python -m attnorm.analysis" in capsys.readouterr().err


def test_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "attnorm.analysis", "norm-scaling", "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(tmp_path / name) for name in FILES]
