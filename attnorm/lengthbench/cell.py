"""One cell: a contender on a task, from the learning rate sweep to the last checkpoint's evaluation."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from attnorm.lengthbench import evaluation
from attnorm.lengthbench.contenders import Contender
from attnorm.lengthbench.evaluation import Place
from attnorm.lengthbench.programs import (
    DIAGNOSED_DRAWS,
    DIAGNOSED_SEQUENCES,
    Programs,
    make_members,
    train_config,
)
from attnorm.lengthbench.suites import Suite

# Not one of the seeds that are reported, so that no reported run was chosen for its luck.
_SWEEP_SEED = 2**30
# Of a task: what a report says beside the numbers, and computes anew.
_ONLY_REPORTED = ("chance", "facts", "mastery")


def settings_of(suite: Suite, spec: Any) -> dict[str, Any]:
    """What a cell's numbers depend on, beside its task, contender and versions of packages."""
    of_suite = dataclasses.asdict(suite)
    for name in ("contenders", "tasks", "also"):
        del of_suite[name]
    of_task = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    return _jsonable(
        {
            "suite": of_suite,
            "task": {name: value for name, value in of_task.items() if name not in _ONLY_REPORTED},
            "optimizer": dataclasses.asdict(train_config(suite, spec).optimizer),
            "evaluation": {
                "most_sequences": evaluation.MOST_SEQUENCES,
                "batch_positions": evaluation.BATCH_POSITIONS,
                "longest_shared": evaluation.LONGEST_SHARED,
                "diagnosed_sequences": DIAGNOSED_SEQUENCES,
                "diagnosed_draws": DIAGNOSED_DRAWS,
                "sweep_seed": _SWEEP_SEED,
            },
        }
    )


def num_updates(suite: Suite, spec: Any, contender: Contender) -> int:
    """Updates of single members in a cell, of the sweep and after it."""
    num_points = len(suite.learning_rates) + len(contender.specs) - 1
    return spec.num_steps * (num_points + suite.num_seeds)


def run_cell(
    programs: Programs, suite: Suite, contender: Contender, progress: Callable[[int, str | None], None]
) -> dict[str, Any]:
    """The cell's results: the sweep, what was chosen, and rows of metrics and diagnostics by seed, length and variant.

    The choice is by the loss on validation sequences of the training length alone.
    """
    sweep = _sweep(programs, suite, contender, progress)
    best = _best(sweep)

    seeds = range(suite.num_seeds)
    normalizer = contender.normalizers()[contender.specs.index(best["normalizer"])]
    members = make_members([normalizer] * len(seeds), seeds, [best["learning_rate"]] * len(seeds))
    state = programs.train(members, _scaled(progress, len(seeds), "seeds"))
    learned = contender.learned_values(state.params[0]["learned"])
    return _jsonable(
        {
            "sweep": sweep,
            "chosen": {key: best[key] for key in ("normalizer", "learning_rate")},
            "rows": _by_seed(programs.task.spec, seeds, programs.test(state, members), programs.num_tested()),
            "diagnostics": _by_seed(
                programs.task.spec, seeds, programs.diagnose(state, members), programs.num_diagnosed()
            ),
            # Of each seed, layer and head.
            "learned": {name: np.asarray(values).tolist() for name, values in learned.items()},
        }
    )


def _sweep(programs, suite, contender, progress):
    """All learning rates with the middle normaliser; then the other normalisers with the best of them."""
    middle = len(contender.specs) // 2
    rows = _sweep_points(
        programs, suite, contender, progress, [(middle, rate) for rate in suite.learning_rates]
    )
    rate = _best(rows)["learning_rate"]
    others = [(index, rate) for index in range(len(contender.specs)) if index != middle]
    return rows + _sweep_points(programs, suite, contender, progress, others)


def _best(rows):
    return min(rows, key=lambda row: math.inf if row["loss"] is None else row["loss"])


def _sweep_points(programs, suite, contender, progress, points):
    """As many members at a time as there are seeds, so that one compiled program trains both."""
    normalizers = contender.normalizers()
    metric = programs.task.spec.metric
    rows = []
    for first in range(0, len(points), suite.num_seeds):
        part = points[first : first + suite.num_seeds]
        filled = part + part[-1:] * (suite.num_seeds - len(part))
        members = make_members(
            [normalizers[index] for index, _ in filled],
            [_SWEEP_SEED] * len(filled),
            [rate for _, rate in filled],
        )
        state = programs.train(members, _scaled(progress, len(part), "sweep"))
        metrics = jax.device_get(programs.validate(state, members))
        rows += [
            {
                "normalizer": contender.specs[index],
                "learning_rate": rate,
                "loss": _number(metrics["loss"][i]),
                metric: _number(metrics[metric][i]),
            }
            for i, (index, rate) in enumerate(part)
        ]
    return rows


def _scaled(progress, num_members, name):
    return lambda count, message: progress(num_members * count, message and f"{name}  {message}")


def _by_seed(
    spec: Any,
    seeds: Sequence[int],
    by_place: Mapping[Place, Mapping[str, Any]],
    num_sequences: Mapping[Place, int],
) -> list[dict[str, Any]]:
    return [
        {
            "seed": seed,
            "factor": place[0] // spec.length,
            "length": place[0],
            "variant": place[1],
            "sequences": num_sequences[place],
            **{name: _number(values[i]) for name, values in metrics.items()},
        }
        for place, metrics in jax.device_get(by_place).items()
        for i, seed in enumerate(seeds)
    ]


def _number(x: Any) -> float | None:
    """None for what is infinite or NaN, which JSON does not have."""
    return float(x) if math.isfinite(x) else None


def _jsonable(x: Any) -> Any:
    """As it will be read again: mappings, lists, words, and numbers that JSON has; a function is its name."""
    if isinstance(x, functools.partial):
        return {"function": _jsonable(x.func), "arguments": _jsonable([x.args, x.keywords])}
    if callable(x):
        return f"{x.__module__}.{x.__qualname__}"
    if isinstance(x, Mapping):
        return {str(key): _jsonable(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return [_jsonable(value) for value in x]
    return _number(x) if isinstance(x, float) else x
