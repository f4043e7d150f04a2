"""Numbers at the edge of what their types hold, and where two logits or two heads are hard to tell apart."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm.dropout import Dropout

QUERY, KEY, VALUE = (
    np.random.default_rng(seed).normal(size=(2, 5, 4, 8)).astype(np.float32) for seed in range(3)
)
IMPLEMENTATIONS = ("reference", "chunked")


def attend(**options):
    return attnorm.dot_product_attention(QUERY, KEY, VALUE, **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "options, equal",
    [
        (dict(is_causal=True, query_offset=2**32), {}),
        (dict(is_causal=True, query_offset=2**31 - 1), {}),
        (dict(is_causal=True, query_offset=jnp.int32(2**31 - 1)), {}),
        (dict(is_causal=True, query_offset=-(2**31)), dict(key_value_seq_lengths=[0, 0])),
        (dict(local_window_size=(2**31, 2**40)), {}),
        (dict(key_value_seq_lengths=np.int64([2**32 + 2] * 2)), {}),
        (dict(key_value_seq_lengths=np.uint32([2**32 - 1] * 2)), {}),
        (dict(key_value_seq_lengths=[-3, 9]), dict(key_value_seq_lengths=[0, 5])),
    ],
)
def test_integers_beyond_every_index_mean_what_they_say(options, equal, implementation):
    np.testing.assert_allclose(
        attend(**options, implementation=implementation),
        attend(**equal, implementation="reference"),
        atol=1e-6,
    )


def test_segment_ids_are_never_wrapped():
    with pytest.raises(ValueError, match="query_segment_ids must fit in int32.*38654705664"):
        attend(query_segment_ids=np.arange(10).reshape(2, 5) * 2**32)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("normalizer", ["l2", "linf", "sink"])
def test_a_nan_cotangent_of_a_row_that_sees_no_key_reaches_nothing(normalizer, implementation):
    lengths = jnp.array([3, 2])

    def function(query, key, value):
        return attnorm.dot_product_attention(
            query, key, value, query_seq_lengths=lengths, normalizer=normalizer, implementation=implementation
        )

    _, pullback = jax.vjp(function, QUERY, KEY, VALUE)
    hidden = (np.arange(5) >= np.array(lengths)[:, None])[..., None, None]
    cotangent = np.ones_like(VALUE)
    for got, expected in zip(
        pullback(jnp.where(hidden, jnp.nan, cotangent)),
        pullback(jnp.where(hidden, 0, cotangent)),
        strict=True,
    ):
        np.testing.assert_array_equal(got, expected)


def test_a_bias_wider_than_the_query_keeps_its_dtype_in_its_gradient():
    with jax.enable_x64(True):
        query, key, value = (np.tile(x, (1, 60, 1, 1)) for x in (QUERY, KEY, VALUE))  # more than one tile

        def function(bias, implementation):
            out = attnorm.dot_product_attention(
                query, key, value, bias, is_causal=True, implementation=implementation
            )
            return jnp.sum(jnp.sin(out))

        gradients = [jax.grad(function)(np.zeros((300, 300)), name) for name in IMPLEMENTATIONS]
        assert gradients[1].dtype == np.float64
        np.testing.assert_allclose(*gradients, atol=1e-4)


def test_maxima_close_together_over_many_tiles_share_one_gradient():
    key = (np.float32(1) + (np.arange(1024) // 256) * np.float32(3e-6)).reshape(1, 1024, 1, 1)
    query, value = np.ones((1, 1, 1, 1), np.float32), np.ones_like(key)

    def log_norm(bias):
        return attnorm.dot_product_attention(
            query,
            key,
            value,
            bias,
            scale=1.0,
            normalizer="linf",
            return_log_norm=True,
            implementation="chunked",
        )[1].sum()

    assert float(jax.grad(log_norm)(jnp.zeros((1, 1024))).sum()) == pytest.approx(1)


def test_close_logits_of_great_size_are_told_apart():
    jacobian = jax.jacrev(attnorm.linf)(jnp.array([1e4, 1e4 - 0.03125, 0.0]))
    slope = np.exp(-0.03125)
    np.testing.assert_allclose(jacobian[1], [-slope, slope, 0], rtol=1e-6)


@pytest.mark.parametrize("p", [-1.0, 0.0, np.nan])
def test_a_traced_p_out_of_range_is_not_silent(p):
    out = jax.jit(lambda p: attend(normalizer=attnorm.get_normalizer("lp", p=p)))(jnp.array([p, 2, 2, 2]))
    assert np.isnan(out[:, :, 0]).all() and np.isfinite(out[:, :, 1:]).all()


@pytest.mark.parametrize("p", [1e39, 1e-44])
def test_p_beyond_float32_is_refused(p):
    with pytest.raises(ValueError, match="p must be a positive number from 1e-06 to 1e\\+06"):
        attnorm.get_normalizer("lp", p=p)


def test_no_two_heads_drop_the_same_pairs():
    """These two heads of these 256 x 32 are those that one 32-bit word a head confused, rows 0 and 849."""
    dropout = Dropout.from_key(0.5, jax.random.key(0))
    first = dropout.tile((256, 32), 0, 1, 0, 256)[149, 13, 0]
    second = dropout.tile((256, 32), 849, 1, 0, 256)[110, 29, 0]
    assert 0.3 < np.mean(first == second) < 0.7


def test_normalizers_with_array_parameters_are_equal_by_value():
    rule = attnorm.get_normalizer("lp", p=jnp.full(4, 2.0))
    assert rule == copy.deepcopy(rule)
    assert rule != attnorm.get_normalizer("lp", p=jnp.full(4, 3.0))
    assert rule != attnorm.get_normalizer("lp", p=2.0)
