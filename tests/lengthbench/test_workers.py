"""Cells side by side: each is run once, and one that ends its process, or fails, is none of the others'."""

import os

import pytest

from attnorm.lengthbench import workers
from attnorm.lengthbench.contenders import parse_contender


def pairs_of(*names):
    return [("copy", parse_contender(name, (1.0,))) for name in names]


def test_a_process_goes_on_with_what_it_has_compiled_and_leaves_that_to_no_other():
    softmax, l2, linf, learned, sigmoid = pairs_of("softmax", "l2", "linf", "lp@learned", "sigmoid")
    waiting = [l2, linf, learned, sigmoid]
    assert workers._next(waiting, softmax, [linf]) == l2
    assert workers._next(waiting, None, [softmax]) == linf
    assert workers._next(waiting[1:], softmax, [linf]) == learned
    assert workers._next([l2], None, [softmax]) == l2


def serve(connection, runner, core):
    while True:
        try:
            _, contender = connection.recv()
        except EOFError:
            return
        if contender.name == "linf":
            os._exit(3)
        connection.send((5, f"{runner} on {core}", False))
        connection.send((0, "no number" if contender.name == "sink" else None, True))


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
    pairs = pairs_of("softmax", "l2", "linf", "sink", "sigmoid")
    board = Board()
    workers.run_apart(pairs, "the runner", board, num_processes=2)
    assert len(board.begun) == 5 and set(board.begun) == set(pairs)
    assert {contender.name: error for (_, contender), error in board.errors.items()} == {
        "softmax": None,
        "l2": None,
        "linf": "its process ended with exit code 3",
        "sink": "no number",
        "sigmoid": None,
    }
    assert board.updates == {pair: 5 for pair in pairs if pair[1].name != "linf"}
