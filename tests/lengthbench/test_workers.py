"""Cells side by side: each is run once, and one that ends its process, or fails, is none of the others'."""

import os

import pytest

from attnorm.lengthbench import workers


def serve(connection, runner, core):
    while True:
        try:
            _, name = connection.recv()
        except EOFError:
            return
        if name == "dies":
            os._exit(3)
        connection.send((5, f"{runner} on {core}", False))
        connection.send((0, "no number" if name == "fails" else None, True))


class Board:
    def __init__(self):
        self.begun, self.updates, self.errors = [], {}, {}

    def started(self, pair):
        self.begun.append(pair)

    def advanced(self, pair, count, message):
        assert message.startswith("the runner on ") and int(message.split()[-1]) in workers.cores()
        self.updates[pair] = count

    def ended(self, pair, error):
        assert pair not in self.errors
        self.errors[pair] = error


@pytest.mark.slow
def test_every_cell_runs_once_whatever_happens_to_the_others(monkeypatch):
    monkeypatch.setattr(workers, "_serve", serve)
    pairs = [("copy", name) for name in ("a", "dies", "fails", "b", "c")]
    board = Board()
    workers.run_apart(pairs, "the runner", board, num_processes=2)
    assert board.begun == pairs
    assert board.errors == {
        ("copy", "a"): None,
        ("copy", "b"): None,
        ("copy", "c"): None,
        ("copy", "fails"): "no number",
        ("copy", "dies"): "its process ended with exit code 3",
    }
    assert board.updates == {pair: 5 for pair in pairs if pair[1] != "dies"}
