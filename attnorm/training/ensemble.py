"""Ensembles: every normaliser with every seed, grouped so that each group is one vmapped computation."""

import dataclasses
from collections.abc import Hashable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from attnorm.normalizers import Normalizer
from attnorm.normalizers.spec import parse_normalizer, with_array_parameters


@dataclasses.dataclass(frozen=True)
class Member:
    """One model of an ensemble."""

    spec: str  # the normaliser as the config spells it
    normalizer: str
    params: tuple[tuple[str, float | str], ...]
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


def make_groups(specs: tuple[str, ...], seeds: tuple[int, ...]) -> tuple[Group, ...]:
    """The members, seeds innermost, in as few groups as the normalisers' structures allow.

    >>> from attnorm.training.ensemble import make_groups
    >>> [len(group.members) for group in make_groups(("lp(p=1)", "lp(p=inf)", "lp(p=2)"), seeds=(0, 1))]
    [4, 2]
    """
    by_structure: dict[Hashable, list[tuple[Member, Normalizer]]] = {}
    for spec in specs:
        name, params = parse_normalizer(spec)
        normalizer = with_array_parameters(name, params)
        group = by_structure.setdefault(jax.tree.structure(normalizer), [])
        group += [(Member(spec, name, tuple(params.items()), seed), normalizer) for seed in seeds]
    groups = []
    for group in by_structure.values():
        members, normalizers = zip(*group, strict=True)
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *normalizers)
        groups.append(Group(members, stacked, jnp.array([member.seed for member in members])))
    return tuple(groups)
