"""Configs: which keys exist, what they must be, and what a config file's argument may say."""

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any

from attnorm.training.ensemble import make_groups

INT32_END = 2**31
OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("constant", "linear", "cosine", "rsqrt", "wsd")


class ConfigError(ValueError):
    """A config that cannot be run; the message names the key."""


@dataclasses.dataclass(frozen=True)
class EnsembleConfig:
    """Every normaliser with every seed; all train in one program."""

    normalizers: tuple[str, ...]  # a name, or a name with parameters: "l2", "lp(p=1.5)", "lp(p=inf)"
    seeds: tuple[int, ...]  # members of one seed share initial weights and data
    members_at_once: int  # that many are vmapped; on a CPU few are faster, because their arrays fit the cache

    def __post_init__(self):
        require(len(self.normalizers) > 0, "normalizers", self.normalizers, "at least one")
        require(self.members_at_once > 0, "members_at_once", self.members_at_once, "a whole number > 0")
        require(len(self.seeds) > 0, "seeds", self.seeds, "at least one")
        require(
            all(0 <= seed < INT32_END for seed in self.seeds),
            "seeds",
            self.seeds,
            "numbers from 0 to 2^31 - 1",
        )
        for key in ("normalizers", "seeds"):
            values = getattr(self, key)
            require(len(set(values)) == len(values), key, values, "without repetition")
        for spec in self.normalizers:
            try:
                make_groups((spec,), self.seeds)
            except (TypeError, ValueError) as error:
                raise ConfigError(f"normalizers: {spec!r}: {error}") from None


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Clipping, then AdamW or Muon; the learning rate warms up and follows a schedule within each stage."""

    name: str  # one of OPTIMIZERS
    schedule: str  # one of SCHEDULES
    learning_rate: float
    weight_decay: float
    beta1: float
    beta2: float
    beta2_exponent: float  # where > 0, beta2 at update t is 1 - t^(-beta2_exponent), whatever beta2 says
    clip_norm: float
    warmup_fraction: float  # of a stage's steps
    cooldown_fraction: float  # linear to almost 0, of a schedule that does not end there by itself
    reset_optimizer: bool  # fresh moments and a new warm-up at each stage

    def __post_init__(self):
        for key, known in (("name", OPTIMIZERS), ("schedule", SCHEDULES)):
            require(getattr(self, key) in known, key, getattr(self, key), f"one of {', '.join(known)}")
        require(0 < self.learning_rate < math.inf, "learning_rate", self.learning_rate, "a number > 0")
        require(self.clip_norm > 0, "clip_norm", self.clip_norm, "a number > 0")  # inf: no clipping
        for key in ("weight_decay", "beta2_exponent"):
            require(0 <= getattr(self, key) < math.inf, key, getattr(self, key), "a number >= 0")
        for key in ("beta1", "beta2", "warmup_fraction", "cooldown_fraction"):
            require(0 <= getattr(self, key) < 1, key, getattr(self, key), "a number in [0, 1)")
        require(
            self.schedule in ("wsd", "rsqrt") or self.cooldown_fraction == 0,
            "cooldown_fraction",
            self.cooldown_fraction,
            f"0 with schedule = {self.schedule}",
        )
        require(
            self.name == "adamw" or self.beta2_exponent == 0,
            "beta2_exponent",
            self.beta2_exponent,
            f"0 with name = {self.name}",
        )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How many devices each axis has; -1, for one of them, is all that the others leave.

    `data` splits the batch; `fsdp` the batch and the parameters; `context` the length; `tensor` heads and hidden
    features. A run may go on with another mesh.
    """

    data: int
    fsdp: int
    context: int
    tensor: int

    def __post_init__(self):
        rest = None
        for key, size in dataclasses.asdict(self).items():
            require(size > 0 or size == -1, key, size, "a whole number > 0, or -1")
            require(size > 0 or rest is None, key, size, f"a whole number > 0 where {rest} is -1")
            rest = key if size == -1 else rest


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """What the loop needs to know. The task's own keys are in the section named after the task."""

    experiment: str
    task: str
    ensemble: EnsembleConfig
    optimizer: OptimizerConfig
    mesh: MeshConfig
    accumulation_steps: int  # parts of a batch that are computed one after the other
    ema_decay: float  # of an average of the parameters, which is then what is evaluated; 0: none
    init_from: str  # a workdir whose newest checkpoint gives the first parameters; "": none
    log_every: int
    eval_every: int  # 0: at the end of each stage only
    checkpoint_every: int
    keep_checkpoints: int  # the newest
    keep_period: int  # beside them, every checkpoint of a step that is a multiple; 0: none

    def __post_init__(self):
        for key in ("log_every", "checkpoint_every", "keep_checkpoints"):
            require(getattr(self, key) > 0, key, getattr(self, key), "a whole number > 0")
        for key in ("eval_every", "keep_period"):
            require(getattr(self, key) >= 0, key, getattr(self, key), "a whole number >= 0")
        require(
            self.accumulation_steps > 0, "accumulation_steps", self.accumulation_steps, "a whole number > 0"
        )
        require(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "a number in [0, 1)")


def require(condition: bool, key: str, got: Any, wanted: str) -> None:
    """Raises a ConfigError that names the key unless the condition holds."""
    if not condition:
        raise ConfigError(f"{key} must be {wanted}, got {got!r}")


def from_mapping(cls: type, mapping: Mapping[str, Any], path: str = "config") -> Any:
    """The dataclass ``cls`` from a nested mapping with exactly its fields.

    Raises:
      ConfigError: an unknown or missing key, a value of another type, or one that the class refuses.

    >>> from attnorm.training.config import EnsembleConfig, from_mapping
    >>> from_mapping(EnsembleConfig, {"normalizers": ("l2",), "seeds": (0, 1), "members_at_once": 2})
    EnsembleConfig(normalizers=('l2',), seeds=(0, 1), members_at_once=2)
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"{path} must be a section of keys, got {mapping!r}")
    types = typing.get_type_hints(cls)
    for key in mapping:
        if key not in types:
            raise ConfigError(f"{path}: {_unknown('key', key, types)}")
    for key in types:
        if key not in mapping:
            raise ConfigError(f"{path}.{key} is missing")
    values = {key: _converted(mapping[key], type_, f"{path}.{key}") for key, type_ in types.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:  # ConfigError is one
        raise ConfigError(f"{path}.{error}") from None


def parse_argument(argument: str | None, **defaults: Any) -> SimpleNamespace:
    """What follows the colon in ``--config=file.py:runlocal,steps=100``, as attributes.

    Args:
      argument: comma-separated ``key=value`` or, for booleans, ``key``; commas in parentheses belong to a value.
      **defaults: the keys that exist; a value is converted to its default's type. A mapping makes the key a preset:
        a boolean, False unless given, that replaces the defaults of other keys where they are not given themselves.

    Raises:
      ConfigError: an unknown key, or a value that cannot be converted.

    >>> from attnorm.training.config import parse_argument
    >>> parse_argument("runlocal", runlocal={"steps": 10}, steps=400)
    namespace(runlocal=True, steps=10)
    >>> parse_argument("runlocal,steps=100", runlocal={"steps": 10}, steps=400)
    namespace(runlocal=True, steps=100)
    """
    presets = {key: value for key, value in defaults.items() if isinstance(value, Mapping)}
    defaults |= dict.fromkeys(presets, False)
    given = {}
    for item in re.split(r",(?![^()]*\))", argument or ""):  # not at the commas of lp(...)
        if not item:
            continue
        key, has_value, text = item.partition("=")
        if key not in defaults:
            raise ConfigError(f"config argument {argument!r}: {_unknown('key', key, defaults)}")
        kind = type(defaults[key])
        try:
            if kind is bool:
                given[key] = {"true": True, "false": False}[text.lower()] if has_value else True
            else:
                given[key] = kind(text)
        except (KeyError, ValueError):
            raise ConfigError(f"config argument {key} must be {kind.__name__}, got {text!r}") from None
    for key, preset in presets.items():
        if given.get(key):
            defaults |= preset
    return SimpleNamespace(**(defaults | given))


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
    return f"unknown {what} {name!r}; {hint}"


def _converted(value: Any, type_: Any, path: str) -> Any:
    if isinstance(type_, type) and dataclasses.is_dataclass(type_):
        return from_mapping(type_, value, path)
    if typing.get_origin(type_) is tuple:
        (item_type, _) = typing.get_args(type_)
        if not isinstance(value, (tuple, list)):
            raise ConfigError(f"{path} must be a tuple, got {value!r}")
        return tuple(_converted(item, item_type, f"{path}[{i}]") for i, item in enumerate(value))
    if type_ is float and type(value) is int:
        return float(value)
    if type(value) is not type_:
        raise ConfigError(f"{path} must be {type_.__name__}, got {value!r}")
    return value
