"""The benchmark at tiny lengths: what it reports, how it fails; never how fast anything is."""

import json
import subprocess
import sys

import numpy as np
import pytest

from attnorm.bench import contenders, runner
from attnorm.bench.__main__ import main, table
from attnorm.bench.contenders import Case

NAMES = ["l2", "softmax", "lp_p3", "jax.nn"]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The JSON and the text of one small run with a process for each contender."""
    out = tmp_path_factory.mktemp("bench") / "report.json"
    command = [sys.executable, "-m", "attnorm.bench", "--lengths", "24", "--rounds", "2", "--out", str(out)]
    run = subprocess.run([*command, "--contenders", *NAMES], capture_output=True, text=True, check=True)
    return json.loads(out.read_text()), run


def test_json_holds_settings_and_every_case(report):
    report, _ = report
    assert set(report) == {"date", "hardware", "versions", "settings", "cases"}
    assert {"cpu", "logical_cores", "system"} <= set(report["hardware"])
    assert {"python", "attnorm", "numpy", "jax", "jaxlib"} <= set(report["versions"])
    assert report["settings"]["threads"] == 2 and report["settings"]["is_causal"] is True
    cases = [(case["length"], case["dtype"], case["direction"]) for case in report["cases"]]
    assert cases == [(24, "float32", "forward"), (24, "float32", "forward_backward")]
    for case in report["cases"]:
        assert list(case["results"]) == NAMES and case["failures"] == {}


def test_ratios_are_those_of_the_rounds(report):
    for case in report[0]["cases"]:
        for name, result in case["results"].items():
            assert len(result["seconds"]) == 2 and min(result["seconds"]) > 0
            assert result["median_seconds"] == pytest.approx(np.median(result["seconds"]))
            assert result["peak_extra_bytes"] >= 0
            peer = case["results"]["jax.nn"]
            expected = np.median(np.divide(peer["seconds"], result["seconds"]))
            assert case["speed_over"][name] == {"jax.nn": pytest.approx(expected)}
            assert np.isfinite(expected) and expected > 0
        assert case["speed_over"]["jax.nn"]["jax.nn"] == 1


def test_contenders_do_the_same_work(report):
    forward, backward = (case["results"] for case in report[0]["cases"])
    assert len(forward["l2"]["fingerprint"]) == 1
    assert len(backward["l2"]["fingerprint"]) == 4  # the output and three gradients
    for results in (forward, backward):
        ours, theirs = (results[name]["fingerprint"] for name in ("softmax", "jax.nn"))
        np.testing.assert_allclose(ours, theirs, rtol=1e-4)
        assert not np.allclose(results["l2"]["fingerprint"], ours, rtol=0.1)
    np.testing.assert_allclose(backward["l2"]["fingerprint"][0], forward["l2"]["fingerprint"][0], rtol=1e-5)


def test_table_and_progress(report):
    report, run = report
    assert run.stdout.strip() == "\n".join(table(case) for case in report["cases"]).strip()
    assert "forward + backward, float32, length 24" in run.stdout
    assert run.stderr.startswith("[1/2] L=24 float32 forward: preparing l2")


def test_table_of_known_numbers():
    case = dict(
        length=8,
        dtype="bfloat16",
        direction="forward",
        results={
            "l2": dict(median_seconds=0.010, peak_extra_bytes=7e6),
            "torch": dict(median_seconds=0.0051, peak_extra_bytes=13e6),
        },
        speed_over={"l2": {"torch": 0.51}, "torch": {"torch": 1.0}},
        failures={"jax.nn": "out of memory"},
    )
    assert [line.split() for line in table(case).strip().split("\n")] == [
        "forward, bfloat16, length 8".split(),
        "median ms speed ÷ torch extra MB".split(),
        ["l2", "10.0", "0.51", "7"],
        ["torch", "5.1", "1.00", "13"],
        "jax.nn: failed, out of memory".split(),
    ]


def test_peak_memory_grows_with_what_a_contender_stores():
    """The dense attention holds 8 matrices of 600 x 600 at least."""
    case = Case(600, "float32", "forward")
    result = runner.run_case(case, ["jax.nn"], rounds=1, threads=2, progress=lambda message: None)
    assert result["results"]["jax.nn"]["peak_extra_bytes"] > 8 * 600 * 600 * 4 * 0.9


def test_a_contender_that_fails_leaves_the_others(monkeypatch):
    monkeypatch.setattr(runner._Worker, "ask", fake_ask)
    messages = []
    result = runner.run_case(
        Case(8, "float32", "forward"), ["dies", "l2", "jax.nn"], rounds=3, threads=2, progress=messages.append
    )
    assert result["failures"] == {"dies": "the process ended"}
    assert result["speed_over"] == {"l2": {"jax.nn": 4.0}, "jax.nn": {"jax.nn": 1.0}}
    order = [name for command, name in fake_ask.calls if command == "run"]
    assert order == ["l2", "jax.nn", "jax.nn", "l2", "l2", "jax.nn"]
    assert messages[0] == "L=8 float32 forward: preparing dies"


def fake_ask(self, command):
    specification = json.loads(self._process.args[-1])
    name = specification["name"]
    fake_ask.calls.append((command, name))
    if name == "dies":
        raise runner.WorkerError("the process ended")
    if command == "prepare":
        return {"peak_extra_bytes": 0, "fingerprint": [1.0], "versions": {}}
    return {"seconds": {"l2": 0.25, "jax.nn": 1.0}[name]}


fake_ask.calls = []


def test_error_and_death_of_a_worker_are_reported():
    with runner._Worker("no such contender", Case(8, "float32", "forward"), 2) as worker:
        with pytest.raises(runner.WorkerError, match="KeyError: 'no such contender'"):
            worker.ask("prepare")
        worker._process.kill()
        worker._process.wait()
        with pytest.raises(runner.WorkerError, match="killed by signal 9"):
            worker.ask("run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "0"], "--lengths: a positive whole number is wanted, got '0'"),
        (["--lengths", "many"], "--lengths: a positive whole number is wanted, got 'many'"),
        (["--rounds", "-1"], "--rounds: a positive whole number is wanted, got '-1'"),
        (["--dtypes", "float31"], "--dtypes: invalid choice: 'float31'"),
        (["--passes", "sideways"], "--passes: invalid choice: 'sideways'"),
        (["--contenders", "l3"], "--contenders: invalid choice: 'l3'"),
        (["--contenders", "l2", "l2"], "--contenders: values are repeated: l2 l2"),
        (["--device", "cpu"], "unrecognized arguments: --device cpu"),
    ],
)
def test_bad_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_contender_that_is_not_installed_is_named(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "torch" not in contenders.available()
    with pytest.raises(SystemExit, match="2"):
        main(["--contenders", "torch"])
    assert "--contenders: torch is not installed" in capsys.readouterr().err


def test_existing_output_is_not_overwritten(tmp_path, capsys):
    out = tmp_path / "mine.json"
    out.write_text("precious")
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(out)])
    assert f"--out: {out} exists" in capsys.readouterr().err
    assert out.read_text() == "precious"
    with pytest.raises(SystemExit, match="2"):
        main(["--out", str(out / "deeper.json")])
    assert f"--out: cannot write {out / 'deeper.json'}" in capsys.readouterr().err
