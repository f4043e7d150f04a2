"""The chunked implementation holds no T x S array, and visits no tile in which nothing is visible."""

import functools
import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import attnorm
from attnorm import chunked
from tests.contract.helpers import make_arrays
from tests.oracles import visible_keys

attend = functools.partial(attnorm.dot_product_attention, implementation="chunked")


def largest_array(jaxpr):
    """Entries of the largest array that any equation makes, in inner programs too."""
    largest = 0
    for equation in jaxpr.eqns:
        largest = max([largest, *(math.prod(x.aval.shape) for x in equation.outvars)])
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr)
        ):
            if isinstance(parameter, core.ClosedJaxpr):
                parameter = parameter.jaxpr
            if isinstance(parameter, core.Jaxpr):
                largest = max(largest, largest_array(parameter))
    return largest


RESTRICTED = {
    "causal": {"is_causal": True},
    "window": {"local_window_size": (100, 20)},
    "offset": {"is_causal": True, "query_offset": np.array([5], np.int32)},
    "lengths": {
        "key_value_seq_lengths": np.array([2000], np.int32),
        "query_seq_lengths": np.array([1000], np.int32),
    },
    "segments": {"query_segment_ids": np.arange(2048, dtype=np.int32)[None] // 100},
    "dropout": {"dropout_rate": 0.1, "dropout_rng": jax.random.key(0), "is_causal": True},
    "bias and mask": {
        "bias": np.zeros((2048, 1), np.float32),
        "mask": np.ones(2048, bool),
        "logits_soft_cap": 5.0,
    },
}


@pytest.mark.parametrize("restricted", RESTRICTED)
def test_no_array_of_length_times_length(restricted):
    T = 2048
    arrays = make_arrays(B=1, T=T, S=T, N=1, K=1, H=8)
    normalizer = attnorm.get_normalizer("lp", p=jnp.ones(1))

    def both(query, key, value, normalizer):
        def loss(*arrays):
            output, log_norm = attend(
                *arrays, normalizer=normalizer, return_log_norm=True, **RESTRICTED[restricted]
            )
            return output.sum() + log_norm.sum()

        return jax.value_and_grad(loss, (0, 1, 2))(query, key, value)

    largest = largest_array(jax.make_jaxpr(both)(*arrays, normalizer).jaxpr)
    assert chunked.default_block_sizes(1).query <= largest < T * T / 4


def test_the_walk_finds_inner_arrays():
    def dense(query, key, value):
        loop = jax.lax.fori_loop(0, 2, lambda _, x: x + (query[0, :, 0] @ key[0, :, 0].T).sum(), 0.0)
        return loop + value.sum()

    arrays = make_arrays(B=1, T=64, S=96, N=1, K=1, H=8)
    assert largest_array(jax.make_jaxpr(dense)(*arrays).jaxpr) == 64 * 96


@dataclass(frozen=True)
class Watched(type(attnorm.get_normalizer("l2"))):
    """L2 that notes, for every tile of logits it is asked about, whether any of them is visible."""

    def terms(self, s, m):
        if s.size > s.shape[0] * TILE:  # a tile, not one number for each row
            jax.debug.callback(lambda visible: VISITS.append(bool(visible)), jnp.any(s > -jnp.inf))
        return super().terms(s, m)


TILE = 16
VISITS = []


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "query_offset": 40},
        {"is_causal": True, "query_offset": -40},
        {"local_window_size": (20, 0)},
        {"local_window_size": (None, 3)},
        {"local_window_size": (3, 30), "query_offset": 20},
        {"is_causal": True, "local_window_size": (40, None), "key_value_seq_lengths": np.array([50])},
        {"key_value_seq_lengths": np.array([33])},
        {"query_seq_lengths": np.array([48])},
        {"query_seq_lengths": np.array([0])},
        {"key_value_seq_lengths": np.array([33]), "query_seq_lengths": np.array([20])},
    ],
    ids=str,
)
def test_only_tiles_with_something_visible_are_visited(options):
    queries, keys = 6, 8
    arrays = make_arrays(B=1, T=queries * TILE, S=keys * TILE, N=1, K=1)
    visible = visible_keys((1, 1, queries * TILE, keys * TILE), **options)[0, 0]
    expected = visible.reshape(queries, TILE, keys, TILE).any((1, 3)).sum()
    VISITS.clear()

    def loss(*arrays):
        return attend(*arrays, normalizer=Watched(p=2.0), **options).sum()

    with chunked.block_sizes(chunked.BlockSizes(TILE, TILE)):
        jax.jit(loss)(*arrays).block_until_ready()
        jax.effects_barrier()
        assert VISITS == [True] * expected
        VISITS.clear()
        jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(*arrays))
        jax.effects_barrier()
    assert VISITS == [True] * (2 * expected)
