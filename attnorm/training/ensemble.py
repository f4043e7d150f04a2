"""Ensembles: every normaliser with every seed, grouped so that each group is one vmapped computation."""

import ast
import dataclasses
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from attnorm.normalizers import Normalizer, get_normalizer

_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)


@dataclasses.dataclass(frozen=True)
class Member:
    """One model of an ensemble."""

    spec: str  # the normaliser as the config spells it
    normalizer: str
    params: tuple[tuple[str, float], ...]
    seed: int

    @property
    def label(self) -> str:
        return f"{self.spec}/seed{self.seed}"


@dataclasses.dataclass(frozen=True)
class Group:
    """Members whose normalisers have the same structure; arrays have a leading member axis M."""

    members: tuple[Member, ...]
    normalizer: Normalizer
    seeds: Int[Array, "M"]


def parse_normalizer(spec: str) -> tuple[str, dict[str, float]]:
    """Name and parameters of ``"l2"``, ``"lp(p=1.5)"``, ``"lp(p=inf)"``.

    Raises:
      ValueError, TypeError: another form, or what :func:`attnorm.get_normalizer` refuses.

    >>> from attnorm.training.ensemble import parse_normalizer
    >>> parse_normalizer("lp(p=1.5)")
    ('lp', {'p': 1.5})
    """
    wanted = f'must be a name or a name with parameters, such as "l2" or "lp(p=1.5)", got {spec!r}'
    try:
        call = ast.parse(spec if "(" in spec else f"{spec}()", mode="eval").body
    except SyntaxError:
        raise ValueError(wanted) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(wanted)
    params = {}
    for keyword in call.keywords:
        text = ast.unparse(keyword.value)
        try:
            params[keyword.arg] = float(text)
        except ValueError:
            raise ValueError(f"{keyword.arg} must be a number, got {text!r}") from None
        if _FLOAT32_MAX < abs(params[keyword.arg]) < math.inf:
            raise ValueError(f"{keyword.arg} must be a number that float32 can hold, got {text!r}")
    get_normalizer(call.func.id, **params)
    return call.func.id, params


def make_groups(specs: tuple[str, ...], seeds: tuple[int, ...]) -> tuple[Group, ...]:
    """The members, seeds innermost, in as few groups as the normalisers' structures allow.

    >>> from attnorm.training.ensemble import make_groups
    >>> [len(group.members) for group in make_groups(("lp(p=1)", "lp(p=inf)", "lp(p=2)"), seeds=(0, 1))]
    [4, 2]
    """
    by_structure = {}
    for spec in specs:
        name, params = parse_normalizer(spec)
        normalizer = _with_arrays(name, params)
        group = by_structure.setdefault(jax.tree.structure(normalizer), [])
        group += [(Member(spec, name, tuple(params.items()), seed), normalizer) for seed in seeds]
    groups = []
    for group in by_structure.values():
        members, normalizers = zip(*group, strict=True)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *normalizers)
        groups.append(Group(members, stacked, jnp.array([member.seed for member in members])))
    return tuple(groups)


def _with_arrays(name: str, params: Mapping[str, float]) -> Normalizer:
    """The parameters become arrays: one traced program then serves all their values."""
    try:
        return get_normalizer(name, **{key: jnp.float32(x) for key, x in params.items()})
    except ValueError:
        # Some values, such as p = inf and n = 0, are accepted as numbers only.
        return get_normalizer(name, **params)
