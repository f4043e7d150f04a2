"""A workdir and the data that its run was started with."""

import pytest

from attnorm.training.workdir import WorkdirError, claimed

CONFIG = {"experiment": "some"}
DATA = {"fingerprint": "crc32 1", "facts": "one text"}
OTHER = {"fingerprint": "crc32 2", "facts": "another text"}


def test_data_that_nothing_tells_of_are_said_to_be_unchecked_once(tmp_path, capsys):
    with claimed(tmp_path, CONFIG, ()):
        (tmp_path / "checkpoints").mkdir()
    with claimed(tmp_path, CONFIG, (), DATA):
        out = capsys.readouterr().out
    assert f"{tmp_path} has no data.json" in out and "one text (crc32 1)" in out
    with claimed(tmp_path, CONFIG, (), DATA):
        pass
    with pytest.raises(WorkdirError, match="was started with other data: one text"):
        with claimed(tmp_path, CONFIG, (), OTHER):
            pass
    assert capsys.readouterr().out == ""


def test_of_a_run_that_has_saved_nothing_no_data_are_missing(tmp_path, capsys):
    with claimed(tmp_path, CONFIG, (), DATA):
        (tmp_path / "data.json").unlink()  # as if killed before it was written
    with claimed(tmp_path, CONFIG, (), DATA):
        pass
    assert capsys.readouterr().out == "" and (tmp_path / "data.json").exists()
