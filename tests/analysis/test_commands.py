"""The command that draws the figure of a counting run again."""

import resource

import pytest

from attnorm.analysis.__main__ import main
from attnorm.analysis.files import write_atomically

HEADER = "normalizer,p,seed,trained_length,prefix,mse,mae,floor,ratio\n"
ROWS = [
    f"lp,{p},{seed},16,{prefix},1,1,1,{p * prefix / 100 + seed / 1000}\n"
    for p in (1.0, 2.0)
    for seed in range(3)
    for prefix in (8, 16, 32)
]


def test_figure_is_drawn_again_and_the_table_printed(tmp_path, capsys):
    (tmp_path / "results.csv").write_text(HEADER + "".join(ROWS))
    (tmp_path / "length_generalization.png").write_text("stale")
    assert main(["length-generalization", str(tmp_path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1] == str(tmp_path / "length_generalization.png")
    assert "p=2" in printed[-2] and "0.321*" in printed[-2]
    assert (tmp_path / "length_generalization.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["length_generalization.png", "results.csv"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "WORKDIR must hold the results.csv"),
        ("a,b\n1,2\n", "is not the results.csv of a counting run: KeyError"),
        (HEADER + ROWS[0].replace("16", "long"), "is not the results.csv of a counting run: ValueError"),
        (HEADER, "holds no evaluation yet"),
    ],
)
def test_workdir_without_results_is_named(tmp_path, capsys, content, message):
    if content is not None:
        (tmp_path / "results.csv").write_text(content)
    before = list(tmp_path.iterdir())
    assert main(["length-generalization", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error and str(tmp_path) in error
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (PermissionError(13, "Permission denied", "mine.csv"), "read or write mine.csv: Permission denied"),
        (OSError("the disk is gone"), "read or write a file: the disk is gone"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, capsys, monkeypatch, raised, message):
    def fail(*_):
        raise raised

    monkeypatch.setattr("attnorm.analysis.length_generalization.median_table", fail)
    (tmp_path / "results.csv").write_text(HEADER)
    assert main(["length-generalization", str(tmp_path)]) == 1
    assert capsys.readouterr().err == f"error: cannot {message}\n"


@pytest.mark.parametrize("arguments", (["norm-scaling"], ["selection", "--model", "synthetic"]))
def test_a_folder_without_a_name_is_refused(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        main([*arguments, "--out", ""])
    assert "argument --out: must be a folder, got an empty name" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_files_that_there_is_no_room_for_are_named(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError) as caught:
            write_atomically(file, b"new" * 1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(file)
    assert [path.name for path in tmp_path.iterdir()] == ["table.csv"] and file.read_text() == "old"
