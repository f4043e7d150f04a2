"""The benchmark at tiny lengths: what it reports, how it fails; never how fast anything is."""

import json
import subprocess
import sys

import numpy as np
import pytest

import attnorm
from attnorm.bench import check, contenders, cost, measured, plot, runner
from attnorm.bench.__main__ import _parser, main
from attnorm.bench.contenders import Case

NAMES = ["chunked l2", "chunked softmax", "jax.nn"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The JSON and the text of one small run with a process for each contender."""
    out = tmp_path_factory.mktemp("bench") / "report.json"
    command = [sys.executable, "-m", "attnorm.bench", "--lengths", "24", "--rounds", "2", "--out", str(out)]
    command += ["--normalizers", "l2", "softmax", "--peers", "jax.nn", "--check"]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(out.read_text()), run


def test_json_holds_settings_and_every_case(report):
    report, _ = report
    assert set(report) == {"kind", "date", "hardware", "versions", "commit", "settings", "cases", "bars"}
    assert report["kind"] == "measured on cpu"
    assert {"cpu", "logical_cores", "system", "device"} <= set(report["hardware"])
    assert {"python", "attnorm", "numpy", "jax", "jaxlib"} <= set(report["versions"])
    assert report["settings"]["threads"] == 2 and report["settings"]["is_causal"] is True
    cases = [(case["length"], case["dtype"], case["direction"]) for case in report["cases"]]
    assert cases == [(24, "float32", "forward"), (24, "float32", "forward_backward")]
    for case in report["cases"]:
        assert list(case["results"]) == NAMES and case["failures"] == {}


def test_ratios_are_those_of_the_rounds(report):
    for case in report[0]["cases"]:
        for name, result in case["results"].items():
            assert len(result["seconds"]) == 2
            assert 0 < result["minimum_seconds"] <= min(result["seconds"])
            assert result["median_seconds"] == pytest.approx(np.median(result["seconds"]))
            assert result["peak_extra_bytes"] >= 0
            peer = case["results"]["jax.nn"]
            expected = np.median(np.divide(peer["seconds"], result["seconds"]))
            assert case["speed_over"][name] == {"jax.nn": pytest.approx(expected)}
            assert np.isfinite(expected) and expected > 0
        assert case["speed_over"]["jax.nn"]["jax.nn"] == 1


def test_contenders_do_the_same_work(report):
    forward, backward = (case["results"] for case in report[0]["cases"])
    assert len(forward["chunked l2"]["fingerprint"]) == 1
    assert len(backward["chunked l2"]["fingerprint"]) == 4  # the output and three gradients
    for results in (forward, backward):
        ours, theirs = (results[name]["fingerprint"] for name in ("chunked softmax", "jax.nn"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
        assert not np.allclose(results["chunked l2"]["fingerprint"], ours, rtol=0.1)
    ours, again = (results["chunked l2"]["fingerprint"][0] for results in (backward, forward))
    np.testing.assert_allclose(ours, again, rtol=1e-5)


def test_every_result_was_compared_with_float64(report):
    for case, results in zip(report[0]["cases"], (1, 4), strict=True):
        for result in case["results"].values():
            assert len(result["errors"]) == results
            assert all(0 < error < 1e-5 for error in result["errors"].values())


def test_table_and_progress(report):
    report, run = report
    assert run.stdout.strip() == "\n".join(measured.table(case) for case in report["cases"]).strip()
    assert "forward + backward, float32, length 24" in run.stdout
    assert run.stderr.startswith("[1/2] L=24 float32 forward: preparing chunked l2")


def test_figure(report, tmp_path):
    pytest.importorskip("matplotlib")
    plot.times(report[0], tmp_path / "times.png")
    assert (tmp_path / "times.png").stat().st_size > 10_000


def test_table_of_known_numbers():
    case = dict(
        device="cpu",
        length=8,
        dtype="bfloat16",
        direction="forward",
        results={
            "chunked l2": dict(median_seconds=0.010, minimum_seconds=0.009, peak_extra_bytes=7e6),
            "torch": dict(median_seconds=0.0051, minimum_seconds=0.0044, peak_extra_bytes=13e6),
        },
        speed_over={"chunked l2": {"torch": 0.51}, "torch": {"torch": 1.0}},
        failures={"jax.nn": "out of memory"},
    )
    assert [line.split() for line in measured.table(case).strip().split("\n")] == [
        "forward, bfloat16, length 8".split(),
        "median ms least ms speed ÷ torch extra MB".split(),
        ["chunked", "l2", "10.0", "9.0", "0.51", "7"],
        ["torch", "5.1", "4.4", "1.00", "13"],
        "jax.nn: failed, out of memory".split(),
    ]


def measured_case(length, dtype, direction, over_torch, over_jax, memory):
    return dict(
        device="cpu",
        length=length,
        dtype=dtype,
        direction=direction,
        results={"chunked l2": dict(peak_extra_bytes=memory), "torch": dict(peak_extra_bytes=100)},
        speed_over={"chunked l2": {"torch": over_torch, "jax.nn": over_jax}},
    )


@pytest.mark.parametrize(
    "case, passed",
    [
        ((1024, "float32", "forward", 0.85, 1.0, 999), [True]),  # jax.nn counts from 2048 on, memory backward
        ((2048, "float32", "forward", 0.84, 4.5, 999), [False, True]),
        ((2048, "bfloat16", "forward", 0.94, 4.4, 999), [False, False]),
        ((4096, "float32", "forward_backward", 0.86, 4.6, 200), [True, True, True]),
        ((8192, "bfloat16", "forward_backward", 1.19, 4.6, 201), [False, True, False]),
        ((512, "float32", "forward", 0.1, 0.1, 999), []),
    ],
)
def test_bars_of_cpu(case, passed):
    bars = measured.bars([measured_case(*case)])
    assert [bar.passed for bar in bars] == passed
    assert [str(bar).split()[0] == "pass" for bar in bars] == passed


@pytest.mark.parametrize("speed, passed", [(0.9, True), (0.89, False)])
def test_bar_of_gpu(speed, passed):
    speeds = {"pallas_gpu l2": {"cudnn": speed}}
    case = dict(
        device="gpu", length=64, dtype="bfloat16", direction="forward", results=speeds, speed_over=speeds
    )
    assert [bar.passed for bar in measured.bars([case])] == [passed]


def test_peak_memory_grows_with_what_a_contender_stores():
    """The dense attention holds 8 matrices of 600 x 600 at least."""
    case = Case("cpu", 600, "float32", "forward")
    result = runner.run_case(case, ["jax.nn"], rounds=1, threads=2, progress=lambda message: None)
    assert result["results"]["jax.nn"]["peak_extra_bytes"] > 8 * 600 * 600 * 4 * 0.9


def test_long_cases_leave_dense_attention_out():
    short, long = (Case("cpu", length, "float32", "forward") for length in (4096, 4097))
    for name, expected in {"jax.nn": False, "reference l2": False, "chunked l2": True, "torch": True}.items():
        assert contenders.fits(name, short)
        assert contenders.fits(name, long) == expected


def test_cases_on_accelerators_have_the_same_number_of_tokens():
    shapes = {Case("gpu", length, "bfloat16", "forward").shape for length in (1024, 16384)}
    assert shapes == {(16, 1024, 16, 128), (1, 16384, 16, 128)}


def test_a_wrong_result_is_a_failure(tmp_path):
    """In parts of 512 rows, the last one short; a tenth of a per cent in one number is noticed."""
    case = Case("cpu", 600, "float32", "forward_backward")
    results = [np.array(x) for x in check.reference(case, "l2")]
    path = tmp_path / "results.npz"
    np.savez(path, *results)
    assert all(error < 1e-7 for error in check.errors(path, case, "l2").values())
    results[2][599, 63] += 1e-3 * np.abs(results[2]).max()
    np.savez(path, *results)
    with pytest.raises(
        check.WrongResult, match="wrong gradient of key: differs from float64 by 0.001, at most"
    ):
        check.errors(path, case, "l2")
    results[2][599, 63] = np.nan
    np.savez(path, *results)
    with pytest.raises(check.WrongResult, match="differs from float64 by nan"):
        check.errors(path, case, "l2")


def test_the_reference_of_a_check_is_attention():
    """Against softmax written out, and its gradient of the values."""
    case = Case("cpu", 520, "float32", "forward_backward")
    query, key, value, cotangent = (x[0, :, -1].astype(np.float64) for x in case.inputs())
    weights = np.exp(query @ key.T / 8) * np.tri(520)
    weights /= weights.sum(axis=1, keepdims=True)
    output, _, _, d_value = check.reference(case, "softmax")
    np.testing.assert_allclose(output, weights @ value, atol=1e-12)
    np.testing.assert_allclose(d_value, weights.T @ cotangent, atol=1e-12)


def test_a_contender_that_fails_leaves_the_others(monkeypatch):
    monkeypatch.setattr(runner._Worker, "ask", fake_ask)
    messages = []
    case = Case("cpu", 8, "float32", "forward")
    names = ["dies", "chunked l2", "jax.nn"]
    result = runner.run_case(case, names, rounds=3, threads=2, progress=messages.append)
    assert result["failures"] == {"dies": "the process ended"}
    assert result["speed_over"] == {"chunked l2": {"jax.nn": 4.0}, "jax.nn": {"jax.nn": 1.0}}
    order = [name for command, name in fake_ask.calls if command == "run"]
    assert order == ["chunked l2", "jax.nn", "jax.nn", "chunked l2", "chunked l2", "jax.nn"]
    assert messages[0] == "L=8 float32 forward: preparing dies"


def fake_ask(self, command, name):
    fake_ask.calls.append((command, name))
    if name == "dies":
        raise runner.WorkerError("the process ended")
    if command == "prepare":
        return {"peak_extra_bytes": 0, "fingerprint": [1.0], "versions": {}}
    seconds = {"chunked l2": 0.25, "jax.nn": 1.0}[name]
    return {"seconds": seconds, "minimum": seconds}


fake_ask.calls = []


def test_error_and_death_of_a_worker_are_reported():
    case = Case("cpu", 8, "float32", "forward")
    with runner._Worker(["no_such_thing l2"], case, 2, sys.executable) as worker:
        with pytest.raises(runner.WorkerError, match="no_such_thing"):
            worker.ask("prepare", "no_such_thing l2")
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(runner.WorkerError, match="killed by signal 9"):
            worker.ask("run", "no_such_thing l2")


def test_one_process_runs_all_contenders_of_a_tpu(monkeypatch):
    """On a machine without one the process says so, for each of them."""
    started = []

    class Worker(runner._Worker):
        def __init__(self, *arguments):
            started.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(runner, "_Worker", Worker)
    monkeypatch.setattr(Worker, "ask", fake_ask)
    case = Case("tpu", 8, "float32", "forward")
    result = runner.run_case(case, ["chunked l2", "jax.nn"], 2, None, lambda message: None)
    assert len(started) == 1 and set(result["results"]) == {"chunked l2", "jax.nn"}


def test_costs_are_medians_of_ratios_in_a_round(monkeypatch):
    times = iter([2.0, 3.0, 9.0, 1.0, 4.0, 2.0])  # softmax, l2; then backwards; then forwards
    monkeypatch.setattr(cost, "_seconds", lambda call: next(times))
    ratios = cost.ratios({"softmax": None, "l2": None}, rounds=3)
    assert ratios == {"softmax": 1.0, "l2": 1.5}  # of 3 / 2, 9 / 1 and 2 / 4


def test_rules_of_one_exponential_and_one_numerator_are_bounded():
    ratios = {name: dict.fromkeys(contenders.PASSES, 1.0) for name in attnorm.normalizer_names()}
    bars = cost.bars(ratios, 2048)
    bounded = {bar.text.removeprefix("forward, ").split(" / ")[0] for bar in bars[::2]}
    assert len(bars) == 2 * len(bounded)
    assert {"l2", "lp", "linf", "sink", "alibi", "sigmoid", "relu", "polynomial"} <= bounded
    two_exponentials, more_numerators = {"general", "softplus", "softpick", "gelu_l2"}, {"affine", "nap"}
    assert not bounded & {*two_exponentials, *more_numerators, "entmax15", "stick_breaking", "softmax"}


@pytest.mark.slow
def test_every_normaliser_has_a_cost(capsys):
    assert main(["--cost", "--lengths", "16", "--rounds", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()[3:]
    end = next(k for k, line in enumerate(lines) if "not served by chunked: none" in line)
    ratios = {line.split()[0]: line.split()[1:] for line in lines[:end]}
    assert set(ratios) == set(attnorm.normalizer_names())
    assert ratios["softmax"] == ["1.00", "1.00"]
    assert any("forward, sink / softmax: " in line for line in lines[end + 1 :])


def test_reports_of_costs_are_added_to_those_in_the_file(tmp_path, monkeypatch, capsys):
    """And the last at a length counts; what is no file of such reports is left alone."""
    measured = iter([{"l2": 1.5, "sink": 1.0}, {"entmax15": 4.5}, {"l2": 1.25}])

    def run(normalizers, length, dtype, rounds, progress):
        found = {name: dict.fromkeys(contenders.PASSES, ratio) for name, ratio in next(measured).items()}
        assert set(normalizers) >= set(found)
        bars = [vars(bar) for bar in cost.bars(found, length)]
        return {
            "settings": {"length": length, "dtype": dtype},
            "ratios": found,
            "not_served": [],
            "bars": bars,
        }

    monkeypatch.setattr(cost, "run", run)
    out = tmp_path / "cost.json"
    assert main(["--cost", "--out", str(out)]) == 0
    assert main(["--cost", "--normalizers", "entmax15", "--lengths", "4096", "--out", str(out)]) == 0
    assert "FAIL  forward, entmax15 / softmax at length 4096: 4.500, at most 4" in capsys.readouterr().out
    assert main(["--cost", "--normalizers", "l2", "--out", str(out)]) == 0
    runs = cost.runs_of(out)
    assert [list(run["ratios"]) for run in runs] == [["l2", "sink"], ["entmax15"], ["l2"]]
    assert [cost.latest(runs, 2048)[name]["forward"] for name in ("l2", "sink")] == [1.25, 1.0]
    assert cost.latest(runs, 4096)["entmax15"]["forward"] == 4.5
    assert runs[0]["bars"][0] == dict(text="forward, l2 / softmax", value=1.5, limit=1.3, at_least=False)
    for text in ("precious", "[1]", '{"kind": "another"}'):
        out.write_text(text)
        with pytest.raises(SystemExit, match="2"):
            main(["--cost", "--out", str(out)])
        assert f"--out: {out} holds no reports of costs" in capsys.readouterr().err
        assert out.read_text() == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "0"], "--lengths: a positive whole number is wanted, got '0'"),
        (["--lengths", "many"], "--lengths: a positive whole number is wanted, got 'many'"),
        (["--rounds", "-1"], "--rounds: a positive whole number is wanted, got '-1'"),
        (["--dtypes", "float31"], "--dtypes: invalid choice: 'float31'"),
        (["--passes", "sideways"], "--passes: invalid choice: 'sideways'"),
        (["--normalizers", "l3"], "--normalizers: invalid choice: 'l3'"),
        (["--normalizers", "l2", "l2"], "--normalizers: values are repeated: l2 l2"),
        (["--normalizers", "l2", "all"], "--normalizers: all stands alone"),
        (["--cost", "--check"], "--check: has no meaning with --cost"),
        (["--cost", "--lengths", "8", "16"], "--lengths, --dtypes: one of each is wanted with --cost"),
        (["--normalizers", "all"], "--normalizers: all has no meaning with --device, but with --cost"),
        (["--device", "abacus"], "--device: invalid choice: 'abacus'"),
        (["--device", "gpu", "--compile-only"], "--compile-only: not allowed with argument --device"),
        (["--peers", "splash"], "--peers: splash does not run on cpu"),
        (["--compile-only"], "--topology: a name such as v5e:2x2 is wanted, got None"),
        (["--compile-only", "--topology", "v5e"], "--topology: a name such as v5e:2x2 is wanted, got 'v5e'"),
        (["--compile-only", "--rounds", "3"], "--rounds: has no meaning with --compile-only"),
        (["--static-cycles", "v5e", "--lengths", "8"], "--lengths: has no meaning with --static-cycles"),
        (["--static-cycles", "v3"], "--static-cycles: invalid choice: 'v3'"),
        (
            ["--static-cycles", "v5e", "--blocks", "100"],
            "--blocks: a multiple of 128 that divides 4096 is wanted",
        ),
        (["--blocks", "512"], "--blocks: has no meaning with --device"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_help_says_what_every_option_does(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # else lines break inside of names
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    for action in _parser()._actions:
        assert action.help, action.dest
    assert "all, not with --device, or of softmax, l2, lp," in shown and "stick_breaking (default:" in shown
    assert "--device cpu: 1024 2048 4096; --device gpu, --device tpu: 1024 4096 16384; --cost, " in shown
    assert "no file that exists, but with --cost" in shown


def test_what_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "torch" not in contenders.default_contenders("cpu", ["l2"])
    for arguments, message in {
        ("--peers", "torch"): "--peers: torch is not installed",
        ("--plot", "times.png"): "--plot: needs matplotlib, which is not installed",
        ("--static-cycles", "v5e"): "--static-cycles: needs libtpu, which is not installed; in the checkout",
        ("--compile-only", "--topology", "v5e:2x2"): "--compile-only: needs libtpu, which is not installed",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert message in capsys.readouterr().err


def test_a_device_that_is_not_here_is_named(capsys, monkeypatch, tmp_path):
    answer = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no such backend")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(SystemExit, match="2"):
        main(["--device", "gpu", "--out", str(tmp_path / "gpu.json")])
    message = "--device: JAX finds no gpu here: RuntimeError: no such backend"
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_existing_files_are_not_overwritten(tmp_path, capsys):
    mine = tmp_path / "mine.json"
    mine.write_text("precious")
    for flag in ("--out", "--plot"):
        with pytest.raises(SystemExit, match="2"):
            main([flag, str(mine)])
        assert f"{flag}: {mine} exists" in capsys.readouterr().err
        assert mine.read_text() == "precious"
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(mine / "deeper.json")])
    assert f"--out: cannot write {mine / 'deeper.json'}" in capsys.readouterr().err
