"""Values and masks that hypothesis thinks up, on one compiled shape, against the float64 oracle."""

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import attnorm
from attnorm import chunked
from tests import oracles
from tests.contract.cases import IMPLEMENTATIONS, poison
from tests.contract.helpers import make_cotangents

# Two tiles of keys or more in every implementation.
B, T, S, N, K, H = 1, 5, 140, 2, 1, 4
EPS = np.finfo(np.float32).eps


def numbers(low, high, *shape):
    elements = st.floats(low, high, width=32, allow_subnormal=False)
    return arrays(np.float32, shape, elements=elements)


INPUTS = {
    "query": numbers(-4, 4, B, T, N, H),
    "key": numbers(-4, 4, B, S, K, H),
    "value": numbers(-4, 4, B, S, K, H),
    "mask": arrays(bool, (B, N, T, S)),
    "p": numbers(0.5, 6, N),
    "hidden": st.sampled_from([0.0, np.nan, np.inf]),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_and_masks(implementation):
    with chunked.block_sizes(chunked.BlockSizes(4, 64)):
        check(implementation)


def check(implementation):
    """Output, log-norm and every gradient; numbers that nobody sees are NaN or inf in some examples."""

    @jax.jit
    def program(arrays, mask, cotangents):
        def attend(arrays):
            query, key, value, p = (arrays[name] for name in ("query", "key", "value", "p"))
            return attnorm.dot_product_attention(
                query,
                key,
                value,
                mask=mask,
                normalizer=attnorm.get_normalizer("lp", p=p),
                precision="highest",
                return_log_norm=True,
                implementation=implementation,
            )

        results, pull = jax.vjp(attend, arrays)
        return results, *pull(cotangents)

    @settings(
        max_examples=10,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(**INPUTS)
    def of_example(query, key, value, mask, p, hidden):
        clean = {"query": query, "key": key, "value": value}
        cotangents = make_cotangents(query, value)
        expected = oracles.attention(
            **clean,
            normalizer="lp",
            params={"p": p},
            visible=mask,
            d_output=cotangents[0],
            d_log_norm=cotangents[1],
        )
        (output, log_norm), gradients = program(poison(clean, mask, hidden) | {"p": p}, mask, cotangents)

        def assert_close(what, got, wanted, scale):
            is_empty = np.isneginf(wanted)
            np.testing.assert_array_equal(np.isneginf(got), is_empty, err_msg=what)
            error = np.max(np.abs(np.where(is_empty, 0, got) - np.where(is_empty, 0, wanted)))
            assert error <= 16 * EPS * (1 + expected.largest_logit) * scale, f"{what}: {error}, scale {scale}"

        largest_sum = max(1, S ** (1 - 1 / p.max()))  # of the weights of a row whose p-norm is 1
        assert_close("output", output, expected.output, np.max(np.abs(value)) * largest_sum)
        assert_close("log norm", log_norm, expected.log_norm, 1)
        for name, got in gradients.items():
            assert_close(f"gradient of {name}", got, expected.gradients[name], np.max(expected.terms[name]))

    of_example()
