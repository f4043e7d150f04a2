"""Normalisers as a config spells them, and members grouped by structure."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm.training.ensemble import make_groups, parse_normalizer


@pytest.mark.parametrize(
    ("spec", "parsed"),
    [
        ("softmax", ("softmax", {})),
        ("lp(p=1.5)", ("lp", {"p": 1.5})),
        ("lp(p=inf)", ("lp", {"p": math.inf})),
        ("softmax_plus_n(n=2)", ("softmax_plus_n", {"n": 2.0})),
        ("general(F=relu, p=2)", ("general", {"F": "relu", "p": 2.0})),
        ("polynomial(k=3)", ("polynomial", {"k": 3.0})),
        ("top_k(k=3)", ("top_k", {"k": 3.0})),
    ],
)
def test_parse(spec, parsed):
    assert parse_normalizer(spec) == parsed


@pytest.mark.parametrize(
    "spec", ["lp(2)", "lp(p=2", "", "import os", "lp(p=nan)", "__import__('os')", "general(F=tanh)"]
)
def test_parse_refuses(spec):
    with pytest.raises((TypeError, ValueError)):
        parse_normalizer(spec)


def test_what_is_refused_is_named():
    with pytest.raises(ValueError, match="normalizer must be a name or a name with parameters"):
        parse_normalizer("lp(2)")
    with pytest.raises(ValueError, match="normalizer must be a name or a name with parameters"):
        parse_normalizer("lp(**2)")
    with pytest.raises(ValueError, match="did you mean 'l2'"):
        parse_normalizer("L2")


def test_groups_hold_every_pair_once_and_the_weights_of_each_member_are_its_own():
    specs = ("lp(p=1)", "lp(p=inf)", "lp(p=3)", "softmax_plus_n(n=2)", "softmax_plus_n(n=0)")
    specs += ("general(F=relu, p=2)", "general(F=gelu, p=2)", "general(F=relu, p=3)", "polynomial(k=2)")
    groups = make_groups(specs, seeds=(5, 7))
    assert [[member.label for member in group.members] for group in groups] == [
        ["lp(p=1)/seed5", "lp(p=1)/seed7", "lp(p=3)/seed5", "lp(p=3)/seed7"],
        ["lp(p=inf)/seed5", "lp(p=inf)/seed7"],
        ["softmax_plus_n(n=2)/seed5", "softmax_plus_n(n=2)/seed7"],
        ["softmax_plus_n(n=0)/seed5", "softmax_plus_n(n=0)/seed7"],
        [f"general(F=relu, p={p})/seed{seed}" for p in (2, 3) for seed in (5, 7)],
        ["general(F=gelu, p=2)/seed5", "general(F=gelu, p=2)/seed7"],
        ["polynomial(k=2)/seed5", "polynomial(k=2)/seed7"],
    ]
    logits = jnp.array([0.3, -1.0, 2.0])
    for group in groups:
        assert group.seeds.tolist() == [member.seed for member in group.members]
        size = len(group.members)
        weights = jax.vmap(lambda normalizer, _: normalizer.weights(logits))(
            group.normalizer, jnp.arange(size)
        )
        for row, member in zip(weights, group.members, strict=True):
            expected = attnorm.get_normalizer(member.normalizer, **dict(member.params)).weights(logits)
            np.testing.assert_allclose(row, expected, rtol=1e-6)
