"""Partial results over disjoint keys merge into attention over all of them, gradients included."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm import kernels
from attnorm.kernels import tpu
from attnorm.masks import Visibility
from attnorm.normalizers.rule import merge
from tests.contract.helpers import assert_matches_oracle, make_arrays
from tests.kernels.conftest import INTERPRET

T, S, N = 140, 300, 2


def attend_in_parts(cuts, query, key, value, bias, *, query_offset, is_causal, normalizer, return_log_norm):
    """Attention over the keys between neighbouring cuts, merged."""
    assert is_causal and return_log_norm
    states = []
    for start, stop in itertools.pairwise(cuts):
        keys = slice(start, stop)
        visibility = Visibility(
            num_queries=T, num_keys=stop - start, right=0, offset=jnp.int32(query_offset - start)
        )
        with kernels.config(INTERPRET):
            states.append(
                tpu.partial_attend(
                    query,
                    key[:, keys],
                    value[:, keys],
                    bias[..., keys],
                    visibility,
                    normalizer,
                    scale=query.shape[-1] ** -0.5,
                    logits_soft_cap=None,
                    precision="highest",
                )
            )
    over_rows = jax.tree.map(lambda leaf: jnp.reshape(leaf, (-1, 1)), normalizer)
    merged = functools.reduce(functools.partial(merge, over_rows), states)
    output, log_norm = merged.finalize(over_rows)
    return output, log_norm[..., 0]


def check(cuts, normalizer="l2", params=None):
    query, key, value = make_arrays(B=1, T=T, S=S, N=N, K=1)
    bias = np.random.default_rng(2).normal(size=(1, N, 1, S)).astype(np.float32)
    assert_matches_oracle(
        functools.partial(attend_in_parts, cuts),
        query,
        key,
        value,
        bias,
        normalizer=normalizer,
        params=params,
        is_causal=True,
        query_offset=-5,  # the first five queries see no key at all
    )


def test_two_parts():
    check((0, 60, S))


@pytest.mark.slow
@pytest.mark.parametrize(
    "normalizer, params",
    [
        ("linf", None),
        ("lp", {"p": np.array([0.7, 5.0], np.float32)}),
        ("sink", {"b": np.array([-1.0, 2.0], np.float32)}),
    ],
    ids=str,
)
def test_three_parts_one_of_which_nobody_sees(normalizer, params):
    check((0, 60, 200, S), normalizer, params)
