"""The portable GPU kernels, interpreted: values and gradients against the float64 oracle."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm import kernels
from attnorm.kernels import gpu_portable
from attnorm.masks import Visibility
from tests.contract import cases, test_masked
from tests.contract.cases import Case
from tests.contract.helpers import make_arrays
from tests.kernels.features import FUSED
from tests.kernels.test_gpu import assert_like_reference, check, nan_results

PORTABLE = kernels.Config(gpu="portable", interpret=True)


def test_causal(monkeypatch):
    check(
        Case(lengths=(97, 63), heads=(4, 2), restriction="causal", poison=float("nan")),
        monkeypatch,
        config=PORTABLE,
    )


def test_numerators_beyond_float16():
    """Logits of 400 give squares of 160,000, and the sum over 32 keys of weights and values is 16,000."""
    query, key, value = (
        jnp.full((1, length, 1, 16), x, jnp.float16) for length, x in ((8, 10), (32, 10), (32, 0.1))
    )

    def attend(query, key, value):
        return attnorm.dot_product_attention(
            query, key, value, scale=0.25, normalizer="squared_relu", implementation="pallas_gpu"
        )

    with kernels.config(PORTABLE):
        output, pull = jax.vjp(attend, query, key, value)
        d_query, d_key, d_value = pull(jnp.full_like(output, 2.0**-10))
    assert output.dtype == d_key.dtype == jnp.float16
    np.testing.assert_allclose(output, 1.6e4, rtol=2e-3)
    # Weights are 160,000 / 32, and 8 queries give to a value; a logit's slope is 2 · 400 / 32 times the product of
    # cotangent and value, 16 features of which are summed.
    np.testing.assert_allclose(d_value, 8 * 5000 / 1024, rtol=2e-3)
    slope = 25 * 16 * 0.1 / 1024
    np.testing.assert_allclose(d_query, 32 * slope * 0.25 * 10, rtol=2e-3)
    np.testing.assert_allclose(d_key, 8 * slope * 0.25 * 10, rtol=2e-3)


def test_the_kernels_for_hopper_refuse_numerators_beyond_float16():
    query = jnp.ones((1, 8, 1, 16), jnp.float16)
    with (
        kernels.config(kernels.Config(gpu="hopper", interpret=True)),
        pytest.raises(
            NotImplementedError,
            match="float16 is computed in float32 for a rule whose numerators are not bounded",
        ),
    ):
        attnorm.dot_product_attention(query, query, query, normalizer="relu", implementation="pallas_gpu")


@pytest.mark.parametrize("length, dtype", [(2**15, jnp.int8), (2**15 + 1, jnp.int16)])
def test_a_mask_is_within_reach_of_offsets_of_32_bits(length, dtype):
    """Whose largest is 2^31 - 1 where Triton's backend of Pallas takes them: for arrays of up to 2^32 bytes."""
    T, S = 2**16, length
    query, key = (jax.ShapeDtypeStruct((1, x, 1, 16), jnp.bfloat16) for x in (T, S))
    mask = jax.ShapeDtypeStruct((1, 1, T, S), bool)

    def padded_mask(query, key, mask):
        static = SimpleNamespace(left=None, right=None)
        seen = Visibility(num_queries=T, num_keys=S, mask=mask)
        tiling = gpu_portable.Tiling(T, S, 64, 16)
        inputs, _ = gpu_portable._inputs(
            static, tiling, query, key, key, None, attnorm.get_normalizer("l2"), seen, keys_outer=False
        )
        return inputs.mask

    assert jax.eval_shape(padded_mask, query, key, mask).dtype == dtype


# Every restriction once; all dtypes, head dims on either side of a tile, one and several tiles each way.
FACTORS = {
    "restriction": [
        "none",
        "causal-offset-per-batch",
        "window-offset",
        "window-left",
        "both-lengths",
        "segments",
        "own-segments",
        "mask-NTS",
        "mask-1N1S",
        "mask-B1T1",
        "empty-rows",
        "soft-cap",
        "combination",
    ],
    "lengths": [(1, 1), (1, 300), (300, 1), (97, 63), (128, 128), (192, 192), (200, 130)],
    "normalizer": [x for x in cases.NORMALIZERS if x[0] in FUSED],
    "width": [16, 40, 64, 80, 128],
    "value_width": [None, 64, 128],
    "heads": [(1, 1), (2, 2), (4, 2), (3, 1)],
    "batch": [1, 1, 2],
    "dtype": ["f32", "f32", "bf16", "f16"],
    "logits": list(cases.LOGITS),
    "log_norm": [True, False],
    "poison": [None, float("nan"), float("inf")],
}
SLOW_CASES = cases.pairwise(FACTORS, count=len(FACTORS["restriction"]), cost=8e6, seed=4)
WIDE = Case(lengths=(70, 40), width=256, value_width=300, heads=(1, 1), restriction="window")


@pytest.mark.slow
@pytest.mark.parametrize("case", [*SLOW_CASES, WIDE], ids=str)
def test_slow_case(case, monkeypatch):
    check(case, monkeypatch, config=PORTABLE)


@pytest.mark.slow
def test_bias(monkeypatch):
    case = Case(lengths=(97, 163), heads=(4, 2), batch=2, restriction="combination")
    check(case, monkeypatch, bias=True, config=PORTABLE)


@pytest.mark.slow
def test_a_bias_of_minus_infinity_hides_no_nan_of_a_value():
    with kernels.config(PORTABLE):
        test_masked.test_a_bias_of_minus_infinity_hides_no_nan_of_a_value(
            functools.partial(attnorm.dot_product_attention, implementation="pallas_gpu")
        )


@pytest.mark.slow
def test_a_visible_nan_breaks_exactly_what_depends_on_it():
    for got, expected in nan_results(PORTABLE, np.float32, is_causal=True):
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)  # NaN equals NaN alone


@pytest.mark.slow
def test_gradients_under_vmap():
    """Of a batch of batches, where one key serves all; and the rule is one that is translated for other kernels."""
    query, key, value = make_arrays(B=2, T=40, S=70, N=2, K=1)
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in (query[:, None], key[:1], value[:, None])]

    def gradients(implementation):
        def loss(query, key, value):
            out = attnorm.dot_product_attention(
                query,
                key,
                value,
                normalizer="softpick",
                is_causal=True,
                query_offset=30,
                implementation=implementation,
            )
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2)), in_axes=(0, None, 0)))

    assert_like_reference(gradients, arrays, PORTABLE)
