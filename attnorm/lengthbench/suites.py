"""How large a comparison is: contenders, tasks, seeds, and what one run may take."""

import dataclasses
import itertools

from attnorm.normalizers import normalizer_names

# The variant of a task that is like training; others are evaluated beside it.
MAIN = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suite:
    """The sizes of tasks are in :mod:`attnorm.lengthbench.tasks`, by the name of the suite."""

    name: str
    contenders: tuple[str, ...]
    tasks: tuple[str, ...]
    also: tuple[tuple[str, str], ...] = ()  # pairs of a task and a contender beside the grid
    num_seeds: int
    learning_rates: tuple[float, ...]  # of which each contender has the best on each task
    temperatures: tuple[float, ...]  # for the control of that name, in order
    factors: tuple[int, ...]  # evaluated lengths over that of training; 1 is the first
    tokens_per_batch: int
    features: int
    num_heads: int
    num_layers: int
    eval_tokens: int  # at each length, of all variants, about
    diagnosed_positions: int  # the longest sequences whose dense weights are looked at
    members_at_once: int  # that many are vmapped; on a CPU few are faster, because their arrays fit the cache

    def cells(
        self, contenders: tuple[str, ...] | None, tasks: tuple[str, ...] | None
    ) -> list[tuple[str, str]]:
        """Pairs of a task and a contender: those of the suite, or of what was named instead."""
        grid = [(task, name) for task in tasks or self.tasks for name in contenders or self.contenders]
        return grid if contenders or tasks else [*grid, *self.also]


_CONTROLS = ("softmax@sqrt_position", "softmax@head_rms", "softmax@temperature", "lp@learned")
_OTHER_STARTS = ("lp(p=1)@learned", "lp(p=4)@learned")
_SMALL = ("softmax", "l2", "lp(p=4)", "linf", "ssmax@learned", "sink@learned", "sigmoid", "entmax15")
_TASK_CONTROLS = tuple(
    itertools.product(("counting_batch_norm", "counting_keep_optimizer", "passkey_nope"), ("softmax", "l2"))
)
# Why a name of the registry is not in `full`.
LEFT_OUT = {
    "lp": "is l2 as it stands",
    "entmax": "is entmax15 as it stands",
    "affine": "is softmax as it stands; affine@learned is there",
    "yarn": "is softmax as it stands",
    "llama4": "is softmax up to 8192 keys",
    "threshold_rectified": "is of cosines, and these models have dot products",
}
_FULL = tuple(name for name in normalizer_names() if name not in LEFT_OUT)
_FULL_OTHERS = (
    "lp(p=1.5)", "lp(p=4)", "ssmax@learned", "sink@learned", "affine@learned",
    *_CONTROLS, *_OTHER_STARTS, "softmax@head_layer", "softmax@global_layer", "l2@temperature",
)  # fmt: skip

SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            name="tiny",
            contenders=("lp(p=1)", "lp(p=2)"),  # one structure: compiled once
            tasks=("counting", "max_retrieval"),
            num_seeds=2,
            learning_rates=(1e-3, 1e-2),
            temperatures=(0.5, 2.0),
            factors=(1, 4),
            tokens_per_batch=128,
            features=16,
            num_heads=2,
            num_layers=1,
            eval_tokens=1024,
            diagnosed_positions=64,
            members_at_once=2,
        ),
        Suite(
            name="small",
            contenders=_SMALL,
            tasks=("counting", "max_retrieval", "flip_flop", "mqar", "passkey"),
            also=(
                *itertools.product(("counting", "max_retrieval"), _CONTROLS),
                *itertools.product(("counting",), _OTHER_STARTS),
                *itertools.product(("text",), ("softmax", "l2", *_CONTROLS[:2])),
                *_TASK_CONTROLS,
            ),
            num_seeds=3,
            learning_rates=(5e-4, 1e-3, 2e-3),
            temperatures=(0.5, 1.0, 2.0),
            factors=(1, 2, 4, 16, 64),
            tokens_per_batch=1024,
            features=48,
            num_heads=2,
            num_layers=2,
            eval_tokens=2**15,
            diagnosed_positions=512,
            members_at_once=3,
        ),
        Suite(
            name="full",
            contenders=(*_FULL, *_FULL_OTHERS),
            tasks=(
                "counting", "max_retrieval", "mqar", "flip_flop", "sort", "reverse", "copy", "passkey", "text",
            ),
            also=_TASK_CONTROLS,
            num_seeds=5,
            learning_rates=(3e-4, 1e-3, 3e-3),
            temperatures=(0.25, 0.5, 1.0, 2.0),
            factors=(1, 2, 4, 8, 16, 32, 64),
            tokens_per_batch=2**14,
            features=128,
            num_heads=4,
            num_layers=4,
            eval_tokens=2**20,
            diagnosed_positions=2048,
            members_at_once=9,
        ),
    )
}  # fmt: skip
