"""Attention with every normaliser that has a published formula, against the float64 oracle."""

import functools

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
from tests.contract.helpers import assert_near, assert_results_near, make_arrays, make_cotangents, oracle, run
from tests.oracles import FORMULAS, visible_keys

T, S = 20, 29
# Each choice of parameters under one of these, in turn.
RESTRICTIONS = [
    {"is_causal": True, "query_offset": np.array([7, 3], np.int32)},
    {"mask": np.random.default_rng(5).random((2, 1, T, S)) < 0.6},
    {
        "local_window_size": (6, 4),
        "key_value_seq_lengths": np.array([S, 11], np.int32),
        "logits_soft_cap": 2.0,
    },
    {
        "query_segment_ids": np.repeat([[0, 1, 5, 2]], 5, axis=1).repeat(2, 0).astype(np.int32),
        "key_value_segment_ids": (np.arange(S)[None].repeat(2, 0) * 3 // S).astype(np.int32),
    },
]
RESTRICTIONS[1]["mask"][1, :, 3] = False
CHOICES = [choice for name in FORMULAS for choice in oracles.choices(name)]
FIRST = {name: choice for choice, (name, _) in reversed(list(enumerate(CHOICES)))}


def check(choice, implementation):
    name, params = CHOICES[choice]
    params = {
        k: np.linspace(*x, 4).astype(np.float32)
        if isinstance(x, tuple)
        else x.astype(np.float32)
        if isinstance(x, np.ndarray)
        else x
        for k, x in params.items()
    }
    query, key, value = make_arrays(T=T, S=S, H=8)
    arrays = {"query": query, "key": key, "value": value}
    attend = functools.partial(
        attnorm.dot_product_attention, implementation=implementation, precision="highest"
    )
    options = {
        "normalizer": name,
        "params": params,
        "log_norm": FORMULAS[name].has_log_norm,
        "cotangents": make_cotangents(query, value),
        **RESTRICTIONS[choice % len(RESTRICTIONS)],
    }
    restriction = RESTRICTIONS[choice % len(RESTRICTIONS)]
    hiding = {k: x for k, x in restriction.items() if k != "logits_soft_cap"}
    poisoned = poison(arrays, visible_keys((2, 4, T, S), **hiding), np.nan)
    assert np.isnan(poisoned["key"]).any() or np.isnan(poisoned["query"]).any()
    output, log_norm, gradients = run(attend, poisoned, **options)
    expected = oracle(arrays, **options)
    for name in set(gradients) - set(arrays):  # sums over all rows, that may cancel
        error = np.max(np.abs(gradients.pop(name) - expected.gradients[name]))
        assert error <= 4e-6 * expected.terms[name], f"gradient of {name}: {error}"
    assert_results_near((output, log_norm, gradients), expected, 4e-6)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(chunked, "default_block_sizes", lambda *lengths: chunked.BlockSizes(16, 16))


CHUNKED = [name for name in FORMULAS if "chunked" in implementations_of(attnorm.get_normalizer(name))]


@pytest.mark.parametrize("name", CHUNKED)
def test_chunked(name):
    check(FIRST[name], "chunked")


@pytest.mark.slow
@pytest.mark.parametrize(
    "choice", [c for c, (name, _) in enumerate(CHOICES) if name in CHUNKED and c != FIRST[name]]
)
def test_chunked_with_other_parameters(choice):
    check(choice, "chunked")


@pytest.mark.slow
@pytest.mark.parametrize("choice", range(len(CHOICES)))
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
        ("chunked", "l2_gelu", r"chunked: normalizer L2Gelu\(\) needs rows"),
        ("pallas_tpu", "ssmax", r"pallas_tpu: normalizer SSMax\(h=0.168, c=0.0\) needs count, map"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            attnorm.dot_product_attention(*arrays, normalizer=name, implementation=implementation)
    chosen = attnorm.dot_product_attention(*arrays, normalizer="l2_gelu")
    expected = attnorm.dot_product_attention(*arrays, normalizer="l2_gelu", implementation="reference")
    np.testing.assert_array_equal(chosen, expected)


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
