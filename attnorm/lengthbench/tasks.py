"""The tasks by name, at the size of each suite. A new task is a file in attnorm/data and an entry here."""

import dataclasses
import functools
from collections.abc import Callable

from attnorm.data.copy import copy_batch, copy_chance
from attnorm.data.flip_flop import VOCAB_SIZE as FLIP_FLOP_VOCAB
from attnorm.data.flip_flop import flip_flop_batch, flip_flop_chance, flip_flop_right
from attnorm.data.max_retrieval import max_retrieval_batch, max_retrieval_chance
from attnorm.data.mqar import mqar_batch, mqar_chance
from attnorm.data.passkey import VOCAB_SIZE as PASSKEY_VOCAB
from attnorm.data.passkey import passkey_batch, passkey_chance
from attnorm.data.reverse import reverse_batch
from attnorm.data.sort import sort_batch, sort_chance
from attnorm.data.text_windows import VOCAB_SIZE as TEXT_VOCAB
from attnorm.data.text_windows import text_batch, text_chance, text_fingerprint
from attnorm.lengthbench.counting import CountingSpec
from attnorm.lengthbench.sequences import SequenceSpec
from attnorm.lengthbench.suites import MAIN

Spec = SequenceSpec | CountingSpec


def _counting(suite: str) -> CountingSpec:
    first_length, num_stages, num_steps, vocab_size = {
        "tiny": (8, 2, 24, 4),
        "small": (16, 2, 800, 16),
        "full": (32, 5, 20_000, 32),
    }[suite]
    return CountingSpec(
        first_length=first_length, num_stages=num_stages, num_steps=num_steps, vocab_size=vocab_size
    )


def _max_retrieval(suite: str) -> SequenceSpec:
    length, num_steps = {"tiny": (4, 24), "small": (16, 360), "full": (16, 10_000)}[suite]
    return SequenceSpec(
        draw=max_retrieval_batch,
        length=length,
        num_steps=num_steps,
        vocab_size=12,
        position="none",
        metric="accuracy",
        mastery=0.8,
        chance=lambda length: max_retrieval_chance(),
        fewest_sequences=256,  # for each asks once
        training={"shortest": 1},
    )


def _mqar(suite: str) -> SequenceSpec:
    length, num_steps, vocab_size = {"tiny": (8, 24, 8), "small": (32, 600, 32), "full": (64, 10_000, 8192)}[
        suite
    ]

    def pairs(length):
        return min(max(length // 8, 2), vocab_size // 2)

    def draw(key, batch_size, length):
        return mqar_batch(key, batch_size, length, num_pairs=pairs(length), vocab_size=vocab_size)

    return SequenceSpec(
        draw=draw,
        length=length,
        num_steps=num_steps,
        vocab_size=vocab_size + 1,
        position="rope",
        metric="accuracy",
        mastery=0.9,
        chance=lambda length: mqar_chance(pairs(length)),
        facts=f"{pairs(length)} pairs, in longer sequences as many more, but of {vocab_size // 2} keys at most all",
    )


def _flip_flop(suite: str) -> SequenceSpec:
    length, num_steps = {"tiny": (8, 24), "small": (32, 240), "full": (512, 10_000)}[suite]
    return SequenceSpec(
        draw=flip_flop_batch,
        length=length,
        num_steps=num_steps,
        vocab_size=FLIP_FLOP_VOCAB,
        position="rope",
        metric="error",
        mastery=0.05,
        higher_is_better=False,
        chance=lambda length: 1 - flip_flop_chance(),
        right=flip_flop_right,
        training={"ignore": 0.8},
        variants={MAIN: {"ignore": 0.8}, "sparse": {"ignore": 0.98}, "dense": {"ignore": 0.1}},
    )


def _transduction(
    draw: Callable, chance: Callable[[int, int], float], position: str, suite: str
) -> SequenceSpec:
    length, num_steps, vocab_size = {"tiny": (4, 24, 4), "small": (8, 1200, 16), "full": (64, 20_000, 32)}[
        suite
    ]
    return SequenceSpec(
        draw=functools.partial(draw, vocab_size=vocab_size),
        length=length,
        num_steps=num_steps,
        vocab_size=vocab_size + 1,
        position=position,
        metric="exact",
        mastery=0.9,
        chance=lambda length: chance(length, vocab_size),
        width=2,
        training={"shortest": (length + 1) // 2},
    )


def _passkey(suite: str) -> SequenceSpec:
    length, num_steps, num_digits = {"tiny": (16, 24, 2), "small": (32, 600, 3), "full": (256, 10_000, 5)}[
        suite
    ]
    return SequenceSpec(
        draw=functools.partial(passkey_batch, num_digits=num_digits),
        length=length,
        num_steps=num_steps,
        vocab_size=PASSKEY_VOCAB,
        position="rope",
        metric="accuracy",
        mastery=0.95,
        chance=lambda length: passkey_chance(),
        variants={
            MAIN: {},
            "depth 0": {"depth": 0.0},
            "depth 0.5": {"depth": 0.5},
            "depth 1": {"depth": 1.0},
        },
    )


def _text(suite: str) -> SequenceSpec:
    length, num_steps = {"tiny": (16, 24), "small": (32, 600), "full": (256, 10_000)}[suite]
    return SequenceSpec(
        draw=text_batch,
        length=length,
        num_steps=num_steps,
        vocab_size=TEXT_VOCAB,
        position="rope",
        metric="loss",
        mastery=2.8,  # half a nat below the guess: next bytes depend on what was read
        higher_is_better=False,
        chance=lambda length: text_chance(),
        variants={MAIN: {"held_out": True}},
        text=text_fingerprint(),
        facts="bytes of Python's manual, held-out documents; the loss at positions from half the length on; windows "
        "of validation and test may overlap",
    )


TASKS: dict[str, Callable[[str], Spec]] = {
    "counting": _counting,
    "counting_batch_norm": lambda suite: dataclasses.replace(_counting(suite), norm="batch"),
    "counting_keep_optimizer": lambda suite: dataclasses.replace(_counting(suite), reset_optimizer=False),
    "max_retrieval": _max_retrieval,
    "mqar": _mqar,
    "flip_flop": _flip_flop,
    "sort": functools.partial(_transduction, sort_batch, sort_chance, "none"),
    "reverse": functools.partial(_transduction, reverse_batch, copy_chance, "rope"),
    "copy": functools.partial(_transduction, copy_batch, copy_chance, "rope"),
    "passkey": _passkey,
    "text": _text,
    "passkey_nope": lambda suite: dataclasses.replace(_passkey(suite), position="none"),
}

# Tasks that differ from another in one choice.
CONTROL_OF = {
    "counting_batch_norm": "counting",
    "counting_keep_optimizer": "counting",
    "passkey_nope": "passkey",
}
