"""Attention with every normaliser that has a published formula, against the float64 oracle."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm import chunked
from attnorm.attention import implementations_of
from attnorm.kernels import tpu
from attnorm.masks import Visibility
from attnorm.normalizers.rule import merge
from tests import oracles
from tests.contract.cases import poison
from tests.contract.helpers import (
    assert_near,
    assert_results_near,
    make_arrays,
    make_cotangents,
    make_program,
    oracle,
    run,
)
from tests.oracles import FORMULAS, visible_keys

T, S = 20, 29


class Shape(NamedTuple):
    """Of the inputs of a check; H is 8."""

    B: int
    T: int
    S: int
    N: int
    K: int


SMALL = Shape(2, T, S, 4, 2)
CHOICES = [choice for name in FORMULAS for choice in oracles.choices(name)]
FIRST = {name: choice for choice, (name, _) in reversed(list(enumerate(CHOICES)))}


def shown(choice):
    """The id of a test, for ``-k NAME``."""
    return f"{CHOICES[choice][0]}-{choice}"


def restrictions(shape):
    """Each choice of parameters is checked under one of these, in turn."""
    B, T, S = shape[:3]
    mask = np.random.default_rng(5).random((B, 1, T, S)) < 0.6
    mask[-1, :, 3] = False
    return [
        {"is_causal": True, "query_offset": np.array([S // 4, S // 8], np.int32)[-B:]},
        {"mask": mask},
        {
            "local_window_size": (3 * T // 10, T // 5),
            "key_value_seq_lengths": np.array([S, 3 * S // 8 + 1], np.int32)[-B:],
            "logits_soft_cap": 2.0,
        },
        {
            "query_segment_ids": np.repeat([[0, 1, 5, 2]], T // 4, axis=1).repeat(B, 0).astype(np.int32),
            "key_value_segment_ids": (np.arange(S)[None].repeat(B, 0) * 3 // S).astype(np.int32),
        },
    ]


def check(choice, implementation, shape=SMALL):
    arrays, options, expected = make_case(choice, shape)
    attend = functools.partial(
        attnorm.dot_product_attention, implementation=implementation, precision="highest"
    )
    output, log_norm, gradients = run(attend, arrays, **options)
    for name in set(gradients) - set(arrays):  # sums over all rows, that may cancel
        error = np.max(np.abs(gradients.pop(name) - expected.gradients[name]))
        assert error <= 4e-6 * expected.terms[name], f"gradient of {name}: {error}"
    assert_results_near((output, log_norm, gradients), expected, 4e-6)


@functools.lru_cache(maxsize=1)
def make_case(choice, shape):
    """Inputs with NaN wherever nobody sees them, the options of the call, and the oracle's results."""
    name, params = CHOICES[choice]
    B, T, S, N, K = shape
    query, key, value = make_arrays(B, T, S, N, K, H=8)
    arrays = {"query": query, "key": key, "value": value}
    kinds = restrictions(shape)
    restriction = kinds[choice % len(kinds)]
    options = {
        "normalizer": name,
        "params": oracles.as_arrays(params, N),
        "log_norm": FORMULAS[name].has_log_norm,
        "cotangents": make_cotangents(query, value),
        **restriction,
    }
    hiding = {k: x for k, x in restriction.items() if k != "logits_soft_cap"}
    poisoned = poison(arrays, visible_keys((B, N, T, S), **hiding), np.nan)
    assert np.isnan(poisoned["key"]).any() or np.isnan(poisoned["query"]).any()
    return poisoned, options, oracle(arrays, **options)


@pytest.fixture(autouse=True)
def small_tiles():
    with chunked.block_sizes(chunked.BlockSizes(16, 16)):
        yield


CHUNKED = [name for name in FORMULAS if "chunked" in implementations_of(attnorm.get_normalizer(name))]


@pytest.mark.parametrize("name", CHUNKED)
def test_chunked(name):
    check(FIRST[name], "chunked")


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice",
    [c for c, (name, _) in enumerate(CHOICES) if name in CHUNKED and c != FIRST[name]],
    ids=shown,
)
def test_chunked_with_other_parameters(choice):
    check(choice, "chunked")


@pytest.mark.slow
@pytest.mark.parametrize("choice", range(len(CHOICES)), ids=shown)
def test_reference(choice):
    check(choice, "reference")


@pytest.mark.slow
@pytest.mark.parametrize("name", CHUNKED)
def test_large_logits_in_bfloat16_are_finite(name):
    query, key, value = (jnp.asarray(x, jnp.bfloat16) for x in make_arrays(T=T, S=S, H=8))

    def function(query, key, value):
        return attnorm.dot_product_attention(
            query, key, value, is_causal=True, normalizer=name, implementation="chunked"
        )

    output, pullback = jax.vjp(jax.jit(function), 1e4 * query, key, value)
    for x in (output, *pullback(jnp.ones_like(output))):
        assert x.dtype == jnp.bfloat16 and jnp.isfinite(x).all()


def test_a_normaliser_that_an_implementation_cannot_serve_is_refused_with_the_reason():
    arrays = [x[:, :5] for x in make_arrays(H=8)]
    for implementation, name, reason in (
        ("pallas_tpu", "l2_gelu", r"pallas_tpu: normalizer L2Gelu\(\) needs count, rows"),
        ("pallas_tpu", "ssmax", r"pallas_tpu: normalizer SSMax\(h=0.168, c=0.0\) needs count, map"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            attnorm.dot_product_attention(*arrays, normalizer=name, implementation=implementation)
    chosen = attnorm.dot_product_attention(*arrays, normalizer="l2_gelu")
    expected = attnorm.dot_product_attention(*arrays, normalizer="l2_gelu", implementation="reference")
    np.testing.assert_array_equal(chosen, expected)


# Rules that ask for n, to map logits or to spread weights by it; the others that ask, and one that sums it.
COUNTED = ("ssmax", "elastic")
ASKING = ["relu", *(name for name in FORMULAS if "count" in attnorm.get_normalizer(name).needs)]


@pytest.mark.parametrize(
    "name", [*COUNTED, *(pytest.param(x, marks=pytest.mark.slow) for x in ASKING if x not in COUNTED)]
)
def test_a_bias_of_minus_infinity_hides_a_key_and_takes_it_from_the_count(name):
    """But not under a soft cap, which makes its logit finite."""
    query, key, _ = make_arrays(T=T, S=S, H=8)
    seen = np.random.default_rng(7).random((2, 1, T, S)) < 0.6
    bias = np.where(seen, 0, -np.inf).astype(np.float32)

    def weights(**options):
        return np.asarray(attnorm.attention_weights(query, key, normalizer=name, is_causal=True, **options))

    np.testing.assert_allclose(weights(bias=bias), weights(mask=seen), rtol=1e-5, atol=1e-7)
    capped = weights(bias=bias, logits_soft_cap=2.0)
    far = weights(bias=np.where(seen, 0, -1e9).astype(np.float32), logits_soft_cap=2.0)
    np.testing.assert_array_equal(capped, far)


@pytest.mark.parametrize("name", ["ssmax", pytest.param("elastic", marks=pytest.mark.slow)])
def test_tiles_are_told_the_same_count(name):
    query, key, value = make_arrays(T=T, S=S, H=8)
    bias = np.where(np.random.default_rng(7).random((4, T, S)) < 0.6, 0, -np.inf).astype(np.float32)

    def attend(implementation):
        return attnorm.dot_product_attention(
            query, key, value, bias, normalizer=name, implementation=implementation, precision="highest"
        )

    assert_near("output", jax.jit(lambda: attend("chunked"))(), attend("reference"), 5e-6)


# A normaliser for all that ask for the same; first: solved, with several numerators, mapped.
KINDS = {attnorm.get_normalizer(name).needs: name for name in reversed(CHUNKED)}
FIRST_KINDS = ("entmax15", "nap", "ssmax")
KINDS |= {attnorm.get_normalizer(name).needs: name for name in FIRST_KINDS}


@pytest.mark.parametrize(
    "name", [x if x in FIRST_KINDS else pytest.param(x, marks=pytest.mark.slow) for x in KINDS.values()]
)
def test_a_nan_reaches_no_row_and_no_key_that_is_hidden_from_it(name):
    """Query 10 sees keys 8 to 13; of the rows that see key 10, 7 to 12, none sees the keys outside 5 to 15."""
    query, key, value = make_arrays(B=1, T=T, S=T, N=2, K=1, H=8)
    program = make_program(
        functools.partial(attnorm.dot_product_attention, implementation="chunked", precision="highest"),
        normalizer=name,
        cotangents=make_cotangents(query, value),
        log_norm=False,
        local_window_size=(2, 3),
    )
    clean = {"query": query, "key": key, "value": value}
    output, _, gradients = program(clean)
    place = np.arange(T)
    far_rows, far_keys = {}, {}
    far_rows["query"], far_keys["query"] = place != 10, (place < 8) | (place > 13)
    for where in ("key", "value"):
        far_rows[where], far_keys[where] = (place < 7) | (place > 12), (place < 5) | (place > 15)
    for where, clean_array in clean.items():
        broken = clean_array.copy()
        broken[0, 10] = np.nan
        got, _, got_gradients = program(clean | {where: broken})
        rows, keys = far_rows[where], far_keys[where]
        assert np.isnan(got[:, ~rows]).any(), where
        pairs = [(got[:, rows], output[:, rows])]
        for what, of in (("query", rows), ("key", keys), ("value", keys)):
            pairs.append((got_gradients[what][:, of], gradients[what][:, of]))
        for a, b in pairs:
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5, err_msg=f"NaN in {where}")


@pytest.mark.parametrize("name", ["sigmoid", "relu", "softpick", "general", "nap", "affine"])
def test_weights_without_a_norm_have_no_log_norm(name):
    arrays = [x[:, :5] for x in make_arrays(H=8)]
    with pytest.raises(ValueError, match="return_log_norm: normalizer .* has no log-norm"):
        attnorm.dot_product_attention(*arrays, normalizer=name, return_log_norm=True)


def test_mapped_parameters_and_masks():
    """vmap adds an axis to the counts of keys, which the restriction of each element decides."""
    query, key, value = make_arrays(T=T, S=S, H=8)
    masks = np.random.default_rng(6).random((3, 1, 1, T, S)) < 0.5
    scales = jnp.array([[0.1, 0.2, 0.3, 0.4], [1, 1, 1, 1], [0.5, 0, 2, 1]])

    def attend(mask, h):
        return attnorm.dot_product_attention(
            query, key, value, mask=mask, normalizer=attnorm.get_normalizer("ssmax", h=h)
        )

    got = jax.jit(jax.vmap(attend))(masks, scales)
    for element, mask, h in zip(got, masks, scales, strict=True):
        rule = attnorm.get_normalizer("ssmax", h=h)
        expected = attnorm.dot_product_attention(
            query, key, value, mask=mask, normalizer=rule, implementation="reference"
        )
        np.testing.assert_allclose(element, expected, atol=2e-6)


@pytest.mark.parametrize("name", ["softpick", "gelu_l2", "alibi", "nap", "sa_softmax"])
def test_parts_of_the_keys_merge_to_the_whole(name):
    query, key, value = make_arrays(T=T, S=S, H=8)
    rule = attnorm.get_normalizer(name)
    options = {"scale": 1.0, "logits_soft_cap": None, "precision": "highest"}

    @jax.jit
    def merged():
        parts = []
        for start, stop in ((0, 12), (12, S)):
            seen = Visibility(num_queries=T, num_keys=stop - start, offset=jnp.int32(-start))
            own = key[:, start:stop], value[:, start:stop]
            parts.append(chunked.partial_attend(query, *own, None, seen, rule, **options))
        return merge(rule, *parts).finalize(rule)[0]

    expected = attnorm.dot_product_attention(
        query, key, value, normalizer=name, scale=1.0, implementation="reference", precision="highest"
    )
    assert_near("output", merged(), expected, 5e-6)


@pytest.mark.parametrize("implementation", [chunked, tpu])
def test_a_part_of_the_keys_does_not_know_the_number_of_all(implementation):
    query, key, value = make_arrays(T=T, S=S, H=8)
    seen = Visibility(num_queries=T, num_keys=S)
    options = {"scale": 1.0, "logits_soft_cap": None, "precision": None}
    with pytest.raises(ValueError, match=r"SSMax\(.*\) (depends on the number of all keys|needs count, map)"):
        implementation.partial_attend(
            query, key, value, None, seen, attnorm.get_normalizer("ssmax"), **options
        )
