"""Properties that hold for every input: invariances, and results over parts of the keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import attnorm
from attnorm import chunked
from attnorm.masks import Visibility
from attnorm.normalizers.rule import merge
from tests.checks import double_precision
from tests.contract.cases import IMPLEMENTATIONS
from tests.contract.helpers import assert_near
from tests.oracles import ORACLES

# Fixed shapes, so that each function is compiled once however many examples it gets.
B, T, S, N, K, H = 2, 24, 40, 4, 2, 8
few = settings(max_examples=8, derandomize=True, deadline=None, database=None)
seeds = st.integers(0, 2**31)
scales = st.sampled_from([0.1, 1.0, 30.0, 1e4])
RULES = {
    "softmax": lambda: attnorm.get_normalizer("softmax"),
    "l2": lambda: attnorm.get_normalizer("l2"),
    "lp": lambda: attnorm.get_normalizer("lp", p=jnp.array([0.5, 1.0, 3.0, 9.0])),
    "linf": lambda: attnorm.get_normalizer("linf"),
    "softmax_plus_n": lambda: attnorm.get_normalizer("softmax_plus_n", n=jnp.array([0.5, 1.0, 3.0, 9.0])),
    "sink": lambda: attnorm.get_normalizer("sink", b=jnp.array([-2.0, 0.0, 1.0, 5.0])),
}
every_rule = pytest.mark.parametrize("rule", RULES)
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


def test_every_exponential_has_its_properties_tested():
    assert set(RULES) == set(ORACLES)


@pytest.fixture(autouse=True)
def small_tiles():
    with chunked.block_sizes(chunked.BlockSizes(16, 16)):
        yield


def draw(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    query = scale * rng.normal(size=(B, T, N, H))
    return rng, query, rng.normal(size=(B, S, K, H)), rng.normal(size=(B, S, K, H))


def in_double(rule, implementation, **options):
    """(query, key, value, bias, mask) -> output, log norm; compiled once, in float64."""

    @functools.partial(jax.jit)
    def call(query, key, value, bias=None, mask=None):
        return attnorm.dot_product_attention(
            query,
            key,
            value,
            bias,
            mask,
            normalizer=RULES[rule](),
            implementation=implementation,
            return_log_norm=True,
            **options,
        )

    def double(*arrays):
        with double_precision():
            return jax.device_get(call(*arrays))

    return double


def assert_same(got, expected, tolerance=1e-11):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_near("result", a, b, tolerance)


@pytest.mark.parametrize("p", [0.5, 1.0, 2.0, 3.0, 7.5, np.array([0.5, 1.0, 2.0, 4.0])], ids=str)
def test_powers_of_the_weights_sum_to_one(p):
    @jax.jit
    def weights(query, key, mask):
        rule = attnorm.get_normalizer("lp", p=p)
        return attnorm.attention_weights(query, key, mask=mask, normalizer=rule)

    @few
    @given(seeds, scales)
    def check(seed, scale):
        rng, query, key, _ = draw(seed, scale)
        mask = rng.random((B, 1, T, S)) < 0.3
        with double_precision():
            y = np.asarray(weights(query, key, mask))
        power = np.broadcast_to(p, N)[None, :, None, None]
        np.testing.assert_allclose(
            (y**power).sum(-1), np.broadcast_to(mask.any(-1), y.shape[:-1]), atol=1e-12
        )
        assert not y[np.broadcast_to(~mask, y.shape)].any()

    check()


@every_rule
@every_implementation
def test_a_shift_of_a_row_changes_only_its_log_norm(rule, implementation):
    call = in_double(rule, implementation)
    constants = rule in ("sink", "softmax_plus_n")

    @few
    @given(seeds, scales, st.sampled_from([-300.0, -1.0, 7.0, 1e3]))
    def check(seed, scale, shift):
        rng, query, key, value = draw(seed, scale)
        rows = shift * rng.random((B, N, T, 1))
        output, log_norm = call(query, key, value, np.zeros((B, N, T, 1)))
        shifted, shifted_log_norm = call(query, key, value, rows)
        if constants:  # the constant is not shifted along, so the weights move with the log norm
            moved = np.exp(np.moveaxis(rows[..., 0], 1, 2) + log_norm - shifted_log_norm)
            assert_near("output", shifted, output * moved[..., None], 1e-9)
        else:
            tolerance = 1e-13 * (1 + 6 * scale + abs(shift))
            assert_near("output", shifted, output, tolerance)
            assert_near("log norm", shifted_log_norm, log_norm + np.moveaxis(rows[..., 0], 1, 2), tolerance)

    check()


@every_rule
@every_implementation
def test_the_order_of_the_keys_does_not_matter(rule, implementation):
    call = in_double(rule, implementation)

    @few
    @given(seeds, scales)
    def check(seed, scale):
        rng, query, key, value = draw(seed, scale)
        bias, mask, order = rng.normal(size=(1, N, T, S)), rng.random((B, 1, T, S)) < 0.5, rng.permutation(S)
        got = call(query, key[:, order], value[:, order], bias[..., order], mask[..., order])
        assert_same(got, call(query, key, value, bias, mask), 1e-11 * (1 + scale))

    check()


@every_rule
@every_implementation
def test_a_masked_key_is_a_removed_key(rule, implementation):
    call = in_double(rule, implementation)

    @few
    @given(seeds, scales)
    def check(seed, scale):
        rng, query, key, value = draw(seed, scale)
        bias, kept = rng.normal(size=(N, 1, S)), np.sort(rng.permutation(S)[:25])
        mask = np.isin(np.arange(S), kept)
        removed = call(query, key[:, kept], value[:, kept], bias[..., kept])
        assert_same(call(query, key, value, bias, mask), removed, 1e-11 * (1 + scale))

    check()


@every_rule
@every_implementation
def test_padding_changes_nothing(rule, implementation):
    call = in_double(rule, implementation)

    def with_lengths(query, key, value):
        lengths = {
            "query_seq_lengths": jnp.full(B, T),
            "key_value_seq_lengths": jnp.full(B, S),
        }
        return in_double_with_lengths(query, key, value, **lengths)

    @jax.jit
    def compiled(query, key, value, **lengths):
        return attnorm.dot_product_attention(
            query,
            key,
            value,
            normalizer=RULES[rule](),
            implementation=implementation,
            return_log_norm=True,
            **lengths,
        )

    def in_double_with_lengths(*arrays, **lengths):
        with double_precision():
            return jax.device_get(compiled(*arrays, **lengths))

    @few
    @given(seeds, scales, st.sampled_from([0.0, np.nan, np.inf, 1e300]))
    def check(seed, scale, padding):
        _, query, key, value = draw(seed, scale)

        def padded(x, count):
            return np.pad(x, [(0, 0), (0, count), (0, 0), (0, 0)], constant_values=padding)

        output, log_norm = with_lengths(padded(query, 9), padded(key, 23), padded(value, 23))
        assert not output[:, T:].any()
        expected = call(query, key, value)
        assert_same((output[:, :T], log_norm[:, :T]), expected, 1e-11 * (1 + scale))

    check()


@every_rule
@every_implementation
def test_no_gradient_reaches_the_future(rule, implementation):
    @jax.jit
    def gradients(query, key, value, row):
        def loss(query, key, value):
            output, log_norm = attnorm.dot_product_attention(
                query,
                key,
                value,
                normalizer=RULES[rule](),
                implementation=implementation,
                is_causal=True,
                query_offset=3,
                return_log_norm=True,
            )
            return output[:, row].sum() + log_norm[:, row].sum()

        return jax.grad(loss, (0, 1, 2))(query, key, value)

    @few
    @given(seeds, st.integers(0, T - 1))
    def check(seed, row):
        _, query, key, value = draw(seed)
        with double_precision():
            d_query, d_key, d_value = jax.device_get(gradients(query, key, value, row))
        assert not np.delete(d_query, row, axis=1).any()
        last = row + 3
        for gradient in (d_key, d_value):
            assert not gradient[:, last + 1 :].any()
            if rule != "linf" or gradient is d_value:
                assert gradient[:, last].all()

    check()


@every_rule
def test_parts_of_the_keys_merge_to_the_whole(rule):
    """In any number of parts and any order, also where a part holds nothing visible."""
    options = {"scale": 0.4, "logits_soft_cap": None, "precision": "highest"}

    @functools.partial(jax.jit, static_argnames=("sizes", "order"))
    def merged(query, key, value, mask, sizes, order):
        normalizer = jax.tree.map(lambda leaf: leaf.astype(query.dtype), RULES[rule]())
        over_rows = jax.tree.map(lambda leaf: leaf[:, None], normalizer)
        stops = np.cumsum(sizes)
        parts = []
        for start, stop in zip(stops - sizes, stops, strict=True):
            visibility = Visibility(num_queries=T, num_keys=stop - start, mask=mask[..., start:stop])
            parts.append(
                chunked.partial_attend(
                    query, key[:, start:stop], value[:, start:stop], None, visibility, normalizer, **options
                )
            )
        total = parts[order[0]]
        for k in order[1:]:
            total = merge(over_rows, total, parts[k])
        output, log_norm = total.finalize(over_rows)
        return output, log_norm[..., 0]

    whole = in_double(rule, "reference", scale=0.4)

    @few
    @given(seeds, scales, st.sampled_from([((40,), (0,)), ((7, 33), (0, 1)), ((16, 4, 20), (2, 0, 1))]))
    def check(seed, scale, split):
        rng, query, key, value = draw(seed, scale)
        mask = rng.random((B, 1, T, S)) < 0.3
        mask[0, :, :5, :20] = False
        mask[0, :, 5] = False
        with double_precision():
            got = merged(query, key, value, mask, *split)
        assert_same(got, whole(query, key, value, None, mask), 1e-12 * (1 + scale))

    check()
