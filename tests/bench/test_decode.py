"""Tokens a second at a tiny size: what is run and reported; never how fast anything is."""

import itertools
import json

import numpy as np
import pytest

from attnorm.bench import decode
from attnorm.bench.__main__ import main

TINY = dict(vocab_size=8, num_layers=1, num_heads=2, features=8, position="rope")


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setattr(decode, "_MODEL", TINY)
    monkeypatch.setattr(decode, "_TOKENS", 2)
    monkeypatch.setattr(decode, "_WINDOW", 4)


def test_report(monkeypatch):
    """With a clock by which every run takes one second more than the one before."""
    ticks = itertools.chain.from_iterable((0.0, float(second)) for second in itertools.count(1))
    monkeypatch.setattr(decode.time, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(decode, "_Run", lambda name, way, length: lambda: None)
    result = decode.run(["l2", "top_k"], [16], rounds=1, progress=lambda message: None)
    cases = {(case["normalizer"], case["cache"]): case for case in result["results"]}
    seconds = {
        ("softmax", "whole"): 1, ("softmax", "split"): 2, ("softmax", "window"): 3, ("softmax", "none"): 4,
        ("l2", "whole"): 5, ("l2", "split"): 6, ("l2", "window"): 7, ("l2", "none"): 8,
        ("top_k", "whole"): 9, ("top_k", "window"): 10, ("top_k", "none"): 11,
    }  # fmt: skip
    assert set(cases) == set(seconds)
    for (name, way), own in seconds.items():
        tokens = 1 if way == "none" else 2
        case = cases[name, way]
        assert case["length"] == 16 and case["tokens_per_second"] == tokens / own
        assert case["speed_over_softmax"] == seconds["softmax", way] / own
        assert case["speed_over_whole"] == pytest.approx(tokens / own / (2 / seconds[name, "whole"]))
    table = [line.split() for line in decode.text(result).splitlines()]
    assert table[1] == "After 16 tokens, float32, one text at a time".split()
    assert ["l2", "none", "0.1", "0.50", "0.312"] in table


@pytest.mark.slow
def test_every_run_starts_from_the_same_length_and_adds_its_tokens():
    for way in ("whole", "split", "window"):
        run = decode._Run("l2", way, 16)
        before = np.array(run._state.key)
        run()
        run()
        np.testing.assert_array_equal(run._state.lengths, 18)
        changed = np.any(before != np.asarray(run._state.key), axis=(0, 1, 3, 4))
        slots = {16 % 5, 17 % 5} if way == "window" else {16, 17}
        assert set(np.flatnonzero(changed)) == slots
    run = decode._Run("l2", "none", 16)
    run()
    assert run._state.shape == (1, 16)


@pytest.mark.slow
def test_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(decode, "WAYS", ("whole",))
    out = tmp_path / "decode.json"
    assert main(["--decode", "--lengths", "8", "--rounds", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert decode.text(result) == capsys.readouterr().out.rstrip("\n")
    assert {case["normalizer"] for case in result["results"]} == {"softmax", "l2"}
    assert all(case["tokens_per_second"] > 0 for case in result["results"])


def test_bad_arguments_are_named(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for arguments, message in {
        ("--dtypes", "float32"): "--dtypes: has no meaning with --decode",
        ("--context", "2"): "--context: has no meaning with --decode",
        ("--lengths", "8"): "--decode: needs flax, which is not installed",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            main(["--decode", *arguments])
        assert message in capsys.readouterr().err
