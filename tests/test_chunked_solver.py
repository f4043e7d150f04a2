"""Attention in tiles for rules that solve for a level: the contract, transforms, memory and skipped tiles."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import attnorm
from attnorm import chunked
from attnorm.normalizers.tsallis import Tsallis
from tests.contract.helpers import assert_matches_oracle, assert_near, make_arrays
from tests.contract.test_memory import largest_array

T, S = 40, 53
attend = functools.partial(attnorm.dot_product_attention, implementation="chunked", precision="highest")
reference = functools.partial(attnorm.dot_product_attention, implementation="reference", precision="highest")


@pytest.fixture(autouse=True)
def small_tiles():
    with chunked.block_sizes(chunked.BlockSizes(16, 24)):
        yield


def draw_bias(shape):
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


RESTRICTIONS = {
    "mask, bias and cap": {
        "mask": np.random.default_rng(4).random((2, 1, T, S)) < 0.6,
        "bias": draw_bias((1, 4, T, S)),
        "logits_soft_cap": 4.0,
        "is_causal": True,
        "query_offset": np.array([13, -5], np.int32),
    },
    "window and lengths": {
        "local_window_size": (9, 2),
        "query_seq_lengths": np.array([T, 11], np.int32),
        "key_value_seq_lengths": np.array([30, 0], np.int32),
        "bias": draw_bias((4, 1, S)),
    },
    "segments": {
        "query_segment_ids": np.repeat([[0, 1, 5, 2]], 10, axis=1).repeat(2, 0).astype(np.int32),
        "key_value_segment_ids": (np.arange(S)[None].repeat(2, 0) * 3 // S).astype(np.int32),
        "bias": draw_bias((S,)),
    },
}
SLOW = (
    pytest.param("window and lengths", marks=pytest.mark.slow),
    pytest.param("segments", marks=pytest.mark.slow),
)


@pytest.mark.parametrize("restriction", ["mask, bias and cap", *SLOW])
@pytest.mark.parametrize(
    "name, params",
    [
        ("entmax15", {}),
        pytest.param("entmax", {"alpha": np.float32([0.6, 1.2, 1.5, 1.9])}, marks=pytest.mark.slow),
    ],
)
def test_output_and_gradients_of_the_oracle(name, params, restriction):
    query, key, value = make_arrays(T=T, S=S)
    options = dict(RESTRICTIONS[restriction])
    assert_matches_oracle(
        attend,
        2 * query,
        key,
        value,
        options.pop("bias"),
        normalizer=name,
        params=params,
        log_norm=False,
        tolerance=1e-5,
        **options,
    )


def program(attend, wrap=lambda function: function):
    """Gradients and output with a learned alpha for each head, of (query, key, value, bias, alpha)."""

    @wrap
    def attention(query, key, value, bias, alpha):
        rule = attnorm.get_normalizer("entmax", alpha=alpha)
        return attend(query, key, value, bias, normalizer=rule, is_causal=True, query_offset=13)

    def loss(*arrays):
        output = attention(*arrays)
        return jnp.sum(jnp.sin(output)), output

    return jax.grad(loss, range(5), has_aux=True)


def inputs(copies=()):
    rng = np.random.default_rng(0)
    shapes = (1, T, 2, 8), (1, S, 1, 8), (1, S, 1, 8), (1, 2, 1, S)
    arrays = [rng.normal(size=(*copies, *shape)) for shape in shapes]
    return [x.astype(np.float32) for x in (*arrays, rng.uniform(1.1, 1.9, (*copies, 2)))]


@pytest.mark.slow
def test_mapped_rematerialised_and_sharded_gradients_are_the_plain_ones():
    many = inputs(copies=(2,))
    expected = jax.jit(jax.vmap(program(reference)))(*many)
    got = jax.jit(jax.vmap(program(attend)))(*many)
    first = [x[0] for x in many]
    remat = jax.jit(program(attend, wrap=jax.checkpoint))(*first)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()
    sharded = jax.shard_map(
        program(attend),
        mesh=mesh,
        in_specs=(split, split, split, whole, whole),
        out_specs=((split, split, split, whole, whole), split),
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_near("mapped", a, b, 1e-5)
    for result in (remat, jax.jit(sharded)(*first)):
        for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
            assert_near("result", a, b[0], 1e-5)


@pytest.mark.slow
def test_dropout_is_that_of_the_reference():
    arrays = make_arrays(B=1, T=T, S=S, N=2, K=1, H=8)
    options = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(0), "normalizer": "entmax15"}

    def both(attend):
        loss = lambda *arrays: jnp.sum(attend(*arrays, **options) ** 2)  # noqa: E731
        return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arrays)

    for a, b in zip(jax.tree.leaves(both(attend)), jax.tree.leaves(both(reference)), strict=True):
        assert_near("result", a, b, 1e-5)


def test_no_array_of_length_times_length():
    length = 2048
    arrays = make_arrays(B=1, T=length, S=length, N=1, K=1, H=8)

    def both(alpha, *arrays):
        rule = attnorm.get_normalizer("entmax", alpha=alpha)
        return jax.value_and_grad(lambda *x: attend(*x, normalizer=rule, is_causal=True).sum(), (0, 1, 2))(
            *arrays
        )

    with chunked.block_sizes(None):
        largest = largest_array(jax.make_jaxpr(both)(jnp.full(1, 1.5), *arrays).jaxpr)
    assert chunked.default_block_sizes(1).query <= largest < length * length / 4


VISITS = []


@dataclass(frozen=True)
class Watched(Tsallis):
    """Tsallis that notes the tiles whose weights it is asked for."""

    def probabilities(self, d, level):
        jax.debug.callback(lambda: VISITS.append(1))
        return super().probabilities(d, level)


def test_tiles_without_weight_are_skipped():
    """Keys lose 1 for each step away from the query, so that only tiles near the diagonal have support."""
    length = 96
    query, key, value = make_arrays(B=1, T=length, S=length, N=1, K=1, H=8)
    place = np.arange(length)
    bias = -np.abs(place[:, None] - place[None, :]).astype(np.float32)
    weights = attnorm.attention_weights(query, key, bias, normalizer="entmax15")
    expected = (np.asarray(weights[0, 0]) > 0).reshape(6, 16, 4, 24).any((1, 3)).sum()
    assert expected <= 14

    def loss(*arrays):
        return attend(*arrays, bias, normalizer=Watched(1.5)).sum()

    VISITS.clear()
    jax.block_until_ready(jax.jit(jax.grad(loss, (0, 1, 2)))(query, key, value))
    jax.effects_barrier()
    assert len(VISITS) == 3 * expected  # once for the output, twice for the gradients


def test_a_hidden_nan_reaches_nothing_and_a_visible_one_its_row():
    query, key, value = make_arrays(B=1, T=T, S=T, N=1, K=1, H=8)
    key[0, 30] = np.nan

    def loss(query, key, value):
        output = attend(query, key, value, normalizer="entmax15", is_causal=True)
        return jnp.sum(jnp.where(jnp.arange(T)[:, None, None] < 30, output, 0) ** 2), output

    gradients, output = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(query, key, value)
    assert np.isfinite(output[:, :30]).all() and np.isnan(output[:, 30:]).all()
    d_query = gradients[0][:, :30]
    assert np.isfinite(d_query).all() and np.abs(d_query).max() > 0


def test_what_is_not_served_is_refused_by_name():
    arrays = [x[:, :5] for x in make_arrays(H=8)]
    with pytest.raises(ValueError, match="return_log_norm: normalizer Tsallis.* has no log-norm"):
        attnorm.dot_product_attention(*arrays, normalizer="entmax15", return_log_norm=True)
    with pytest.raises(NotImplementedError, match=r"pallas_tpu: normalizer Tsallis\(alpha=1.5\) needs level"):
        attnorm.dot_product_attention(*arrays, normalizer="entmax15", implementation="pallas_tpu")
