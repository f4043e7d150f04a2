"""What the measurements leave open, with defaults; and what they refuse."""

import dataclasses
import math
import numbers
from collections.abc import Sequence

VECTORS = ("embedding", "layer_input", "values")
AGGREGATES = ("norms", "vector")
HIDDEN = ("left_out", "counted")
SHORT_ROWS = ("dropped", "kept")
LOGITS = ("raw", "scaled")


def _option(default, help, choices=None):
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


@dataclasses.dataclass(frozen=True)
class Options:
    """What the paper leaves open, or fixes without a reason; the help of the command says what each means.

    Raises:
      TypeError: a number that is not one.
      ValueError: an option outside its range; the message names it.

    >>> from attnorm.analysis.selection.options import Options
    >>> Options(lengths=(512, 128)).lengths
    (128, 512)
    """

    lengths: tuple[int, ...] = _option((32, 64, 128, 256, 512, 1024), "the lengths L, in tokens")
    num_selected: tuple[int, ...] = _option(
        (1, 5, 10, 20, 100), "the numbers N of selected keys, at the largest L"
    )
    num_selected_by_length: int = _option(5, "N in the figure against L")
    vectors: str = _option("embedding", "the vectors x of the keys", VECTORS)
    unit_vectors: bool = _option(
        True, "divide x by its norm, as on the paper's sphere (values of the value space never)"
    )
    aggregate: str = _option("norms", "sum of norms, or norm of the sum", AGGREGATES)
    hidden: str = _option(
        "left_out", "whether keys that a row cannot see count as keys outside, with weight 0", HIDDEN
    )
    short_rows: str = _option(
        "dropped",
        "rows of at most N keys; where kept, they have all keys separated and none outside",
        SHORT_ROWS,
    )
    max_rows: int = _option(256, "rows per head, evenly spaced and with the last; 0 for all")
    num_texts: int = _option(1, "consecutive pieces of the text")
    num_draws: int = _option(
        1, "random selections per row for the expected distance, each with and without the top key"
    )
    seed: int = _option(0, "of selections and directions; every layer and text has draws of its own")
    level: float = _option(
        0.01, "of the Kolmogorov-Smirnov test; the paper's text has 0.01, its algorithm 0.05"
    )
    max_critical_fraction: float = _option(0.25, "of L, how far the search for the critical N goes")
    gradient_logits: str = _option(
        "raw",
        "what T divides and ε moves: the products <q, k>, or the model's logits, scaled already",
        LOGITS,
    )
    temperatures: tuple[float, ...] = _option(
        tuple(10 ** (k / 4) for k in range(-12, 9)), "the temperatures T"
    )
    steps: tuple[float, ...] = _option((1e-3, 1e-1, 10.0), "the steps ε")
    max_gradient_rows: int = _option(8, "rows per head for the gradients, as --max-rows")

    def __post_init__(self):
        for name in ("lengths", "num_selected"):
            values = tuple(sorted(set(getattr(self, name))))
            object.__setattr__(self, name, values)
            _require(bool(values), name, values, "at least one number")
            for value in values:
                self._whole(name, value, 1)
        self._whole("num_selected_by_length", self.num_selected_by_length, 1)
        for name, lowest in (("max_rows", 0), ("num_texts", 1), ("num_draws", 1), ("seed", 0)):
            self._whole(name, getattr(self, name), lowest)
        self._whole("max_gradient_rows", self.max_gradient_rows, 0)
        _require(self.seed < 2**32, "seed", self.seed, "below 2^32")
        for field in dataclasses.fields(self):
            choices, value = field.metadata["choices"], getattr(self, field.name)
            _require(not choices or value in choices, field.name, value, f"one of {choices}")
        _require(0 < self.level < 1, "level", self.level, "between 0 and 1")
        _require(
            0 < self.max_critical_fraction <= 1,
            "max_critical_fraction",
            self.max_critical_fraction,
            "above 0 and at most 1",
        )
        for name in ("temperatures", "steps"):
            values = tuple(sorted(set(getattr(self, name))))
            object.__setattr__(self, name, values)
            _require(bool(values), name, values, "at least one number")
            for value in values:
                _require(0 < value < math.inf, name, value, "positive and finite")
                _require(1e-30 <= value <= 1e30, name, value, "from 1e-30 to 1e30")
        _require(
            self.lengths[0] >= 2 and self.lengths[0] > self.num_selected_by_length,
            "lengths",
            self.lengths[0],
            f"above N = {self.num_selected_by_length} (num_selected_by_length)",
        )
        _require(
            self.num_selected[-1] < self.lengths[-1],
            "num_selected",
            self.num_selected[-1],
            f"below the largest length, L = {self.lengths[-1]}",
        )

    def _whole(self, name, value, lowest):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise TypeError(f"{name} must be a whole number, got {value!r}")
        _require(value >= lowest, name, value, f"at least {lowest}")


def _require(condition, name, got, wanted):
    if not condition:
        raise ValueError(f"{name} must be {wanted}, got {got}")


def options_that_fit(max_length: int, lengths: Sequence[int] = ()) -> Options:
    """The defaults, with these lengths or all that a model can read, and without the N that do not fit below them.

    Raises:
      TypeError, ValueError: as :class:`Options`, of the lengths.

    >>> from attnorm.analysis.selection.options import options_that_fit
    >>> options = options_that_fit(64)
    >>> options.lengths, options.num_selected
    ((32, 64), (1, 5, 10, 20))
    >>> options_that_fit(64, lengths=(4, 8)).num_selected_by_length
    3
    """
    default = Options()
    readable = tuple(L for L in default.lengths if L <= max_length) or (max_length,)
    chosen = Options(lengths=tuple(lengths) or readable, num_selected=(1,), num_selected_by_length=1).lengths
    return Options(
        lengths=chosen,
        num_selected=tuple(N for N in default.num_selected if N < chosen[-1]),
        num_selected_by_length=min(default.num_selected_by_length, chosen[0] - 1),
    )
