"""Bars and tables of counted cycles from numbers made up; and, where libtpu is installed, counts of real kernels."""

import json
import subprocess
import sys

import pytest

from attnorm.bench import agreement, compile_only, plot, report, static_cycles, tpu_kernels
from attnorm.bench.cycles import CHIPS


def numbers(total):
    parts = dict(issue=total, compute=total, matmul_excess=0, dma_stall=0, sums_after=0, matmul_share=0.5)
    return {**parts, "total": total, "vmem_bytes": 2**20, "code_bundles": 7, "kernels": 1}


def counted(forward, backward):
    """At blocks of 512 and 1024."""
    return {
        direction: {str(block): numbers(total) for block, total in zip((512, 1024), totals, strict=True)}
        for direction, totals in (("forward", forward), ("backward", backward))
    }


CYCLES = {
    "l2": counted((110, 100), (78, 90)),
    "softmax": counted((99, 98), (78, 78)),
    "lp, p per head": counted((126, 130), (97, 97)),
    "sink, b per head": counted((115, 200), (90, 90)),
    "splash": counted((100, 101), (100, 200)),
    "splash, fused backward": counted((100, 101), (70, 75)),
}


def test_bars_are_ratios_at_the_better_block():
    bars = {bar.text: (bar.value, bar.passed) for bar in static_cycles.bars("v5e", CYCLES)}
    assert bars == {
        "v5e forward, l2 / splash": (1.0, True),
        "v5e backward, l2 / splash": (0.78, True),
        "v5e backward, l2 / splash, fused backward": (pytest.approx(78 / 70), False),
        "v5e forward, l2 / softmax": (pytest.approx(100 / 98), True),
        "v5e backward, l2 / softmax": (1.0, True),
        "v5e forward, lp, p per head / l2": (1.26, False),
        "v5e backward, lp, p per head / l2": (pytest.approx(97 / 78), True),
        "v5e forward, sink, b per head / l2": (1.15, True),
        "v5e backward, sink, b per head / l2": (pytest.approx(90 / 78), False),
    }
    on_v5p = {bar.text: bar.passed for bar in static_cycles.bars("v5p", CYCLES)}
    assert on_v5p["v5p backward, l2 / splash"] is False  # 0.55 there
    on_v6e = {bar.text: bar.passed for bar in static_cycles.bars("v6e", CYCLES)}
    assert on_v6e["v6e backward, sink, b per head / l2"] is True  # 1.25 there


def test_tables_and_figure_of_a_report(tmp_path):
    result = report.new_report("static cycles, counted and not measured")
    bar = report.Bar("v5e forward, l2 / splash", 1.5, 1.0)
    result |= {"chips": {"v5e": CYCLES}, "bars": [vars(bar)], "failures": ["v5e, blocks of 512, matmul: why"]}
    text = static_cycles.text(json.loads(json.dumps(result)))
    row = next(line for line in text.splitlines() if line.startswith("  lp, p per head"))
    assert row.split()[4:] == ["512", "0", "0", "0", "0", "50%", "1.0", "7"]
    assert "FAIL  v5e forward, l2 / splash: 1.500, at most 1" in text
    assert text.endswith("failed: v5e, blocks of 512, matmul: why")
    pytest.importorskip("matplotlib")
    plot.cycles(result, tmp_path / "cycles.png")
    assert (tmp_path / "cycles.png").stat().st_size > 10_000


def test_the_committed_report_agrees_with_another_counter(capsys, tmp_path):
    assert agreement.main([]) == 0
    out = capsys.readouterr().out
    assert all(f"{chip}, {row}" in out for chip in CHIPS for row in ("splash", "flash", "matmul"))
    committed = json.loads((agreement._RESULTS / "static.json").read_text())
    committed["chips"]["v6e"]["flash"]["forward"]["512"]["total"] *= 1.03
    (tmp_path / "other.json").write_text(json.dumps(committed))
    assert agreement.main([str(tmp_path / "other.json")]) == 1
    assert "largest difference 3.0" in capsys.readouterr().out


def test_every_normaliser_has_a_row():
    rows = tpu_kernels.rows(["l2", "lp", "sink", "linf"])
    assert list(rows) == ["l2", "lp, p = 3", "lp, p per head", "sink, b per head", "linf"]
    assert rows["lp, p per head"] == ("lp", {}, ("p",))


def in_a_process(code):
    """libtpu must be prepared before it is loaded, and other tests of this process may have loaded it."""
    command = f"import json\n{code}\nprint(json.dumps(result))"
    run = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.slow
def test_products_of_real_kernels_are_all_counted():
    """Against what must be computed: n³ for a matmul, two products per tile that is not hidden for attention."""
    pytest.importorskip("libtpu")
    code = """
from attnorm.bench import static_cycles, tpu_kernels
from attnorm.bench.cycles import CHIPS
import functools
tpu_kernels.LENGTH = 2048
result = {}
for row, build in {
    "matmul": functools.partial(tpu_kernels.matmul, 512, size=2048),
    "splash": functools.partial(tpu_kernels.splash, 512, fused=False),
    "l2": functools.partial(tpu_kernels.attention, "l2", 512),
}.items():
    for chip in ("v5e", "v5p"):
        result[f"{row} {chip}"] = static_cycles._count(build(), CHIPS[chip])
"""
    result = in_a_process(code)
    # Four units take in one row of 128 each in a cycle.
    tile = 512 * 512 * 128 / (4 * 128 * 128)
    for chip, cores in (("v5e", 1), ("v5p", 2)):
        matmul, splash, ours = (result[f"{row} {chip}"] for row in ("matmul", "splash", "l2"))

        def busy(numbers):
            return numbers["matmul_share"] * numbers["total"]

        assert busy(matmul["forward"]) == pytest.approx(
            2048**3 / 128 / (4 * 128 * 128) / cores * 128, rel=1e-3
        )
        visible = 8 * 10 / cores  # heads, tiles on and below the diagonal of 4 x 4
        assert busy(splash["forward"]) == pytest.approx(2 * tile * visible, rel=0.25)
        # The question whether data are finite takes a few products more in the tiles on the diagonal.
        assert 2 * tile * visible <= busy(ours["forward"]) <= 2.1 * tile * visible
        assert 5 * tile * visible <= busy(ours["backward"]) <= 5.3 * tile * visible


@pytest.mark.slow
def test_compile_only_reports_memory():
    pytest.importorskip("libtpu")
    code = """
from attnorm.bench import compile_only
result = compile_only.run("v5e:2x2", ["l2"], [256], print)
"""
    result = in_a_process(code)
    assert result["failures"] == []
    default, small = result["programs"]
    arrays = 8 * 4096 * 128 * 2  # bytes of one
    for program in (default, small):
        assert program["hbm_bytes"]["arguments"] == 4 * arrays
        assert program["hbm_bytes"]["outputs"] == pytest.approx(4 * arrays, rel=0.01)
        # The backward kernel keeps the gradient of a head's queries, and its windows.
        assert 4096 * 128 * 4 < program["vmem_bytes"]["backward"] < 128 * 2**20
        assert program["code_bytes"] > 0
    assert small["vmem_bytes"]["forward"] < default["vmem_bytes"]["forward"]
    assert "default" in compile_only.text(result) and "256" in compile_only.text(result)
