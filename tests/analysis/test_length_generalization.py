"""The table's medians and marks, and that the figure shows every curve of a results.csv."""

import pytest
from matplotlib.figure import Figure

from attnorm.analysis.length_generalization import draw, median_table, read_ratios

HEADER = "normalizer,p,seed,trained_length,prefix,mse,mae,floor,ratio\n"


@pytest.fixture
def results(tmp_path):
    rows = [
        f"{name},{seed},{length},{prefix},0,0,1,{scale * prefix * (seed + 1) ** 2}\n"
        for name, scale in (("lp,1.0", 0.1), ("lp,2.0", 0.01), ("linf,", 0.001))
        for seed in range(3)
        for length in (4, 8)
        for prefix in (2, 4, 8)
    ]
    path = tmp_path / "results.csv"
    path.write_text(HEADER + "".join(rows))
    return path


def test_ratios_are_the_median_and_the_extremes_over_seeds(results):
    ratios = read_ratios(results)
    assert len(ratios) == 18
    ratio = ratios[8, "p=2", 4]
    assert (ratio.median, ratio.lowest, ratio.highest) == pytest.approx((0.16, 0.04, 0.36))


def test_table_marks_the_trained_length(results):
    lines = median_table(results).splitlines()
    assert lines[1].split() == ["trained", "b=2", "b=4", "b=8"]
    assert [line.split() for line in lines[2:5]] == [
        ["4", "p=1", "0.8", "1.6*", "3.2"],
        ["4", "p=2", "0.08", "0.16*", "0.32"],
        ["4", "linf", "0.008", "0.016*", "0.032"],
    ]
    assert lines[5].split() == ["8", "p=1", "0.8", "1.6", "3.2*"]


def test_figure_has_a_panel_per_length_and_a_line_per_normaliser(results, tmp_path, monkeypatch):
    figures = []
    savefig = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), savefig(self, *a, **k))
    )
    draw(results, tmp_path / "figure.png")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["figure.png", "results.csv"]
    (figure,) = figures
    assert [axes.get_title() for axes in figure.axes] == ["trained to length 4", "trained to length 8"]
    for axes in figure.axes:
        curves = {line.get_label(): line for line in axes.lines if not line.get_label().startswith("_")}
        assert list(curves) == ["p=1", "p=2", "linf"]
        assert list(curves["p=2"].get_ydata()) == pytest.approx([0.08, 0.16, 0.32])
        assert axes.get_xscale() == axes.get_yscale() == "log"


@pytest.mark.parametrize("cut", [",1,0.05\n", "5\n", "\n"])
def test_a_line_that_was_cut_off_is_an_error_that_names_file_and_line(results, cut):
    text = results.read_text()
    line = text.splitlines(keepends=True)[-1]
    results.write_text(text[: -len(line)] + line[: -len(cut)])
    with pytest.raises(ValueError, match=r"results\.csv, line 55 is cut off"):
        read_ratios(results)
    results.write_text(text[: -len(line)] + ",".join(line.split(",")[:4]) + "\n")
    with pytest.raises(ValueError, match=r"results\.csv, line 55 is cut off"):
        read_ratios(results)


def test_a_word_in_place_of_a_number_is_an_error_that_names_file_and_line(results):
    results.write_text(results.read_text().replace("linf,,0,4,2,", "linf,,0,4,two,"))
    with pytest.raises(ValueError, match=r"results\.csv, line 38: .*'two'"):
        read_ratios(results)


def test_a_figure_of_no_rows_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "results.csv").write_text(HEADER)
    with pytest.raises(ValueError, match=r"results\.csv has no rows"):
        draw(tmp_path / "results.csv", tmp_path / "figure.png")
    assert not (tmp_path / "figure.png").exists()
