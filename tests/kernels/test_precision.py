"""Cancellation in the backward pass."""

import jax
import numpy as np

import attnorm
from attnorm import kernels
from tests.contract.helpers import assert_near
from tests.kernels.conftest import INTERPRET


def test_a_row_with_one_key_has_the_gradient_of_its_log_norm_alone():
    """Its output is the value, whatever the logit: the other terms are large, and their sum is zero."""
    T, H = 140, 64

    @jax.jit
    def gradients(query, key, value, d_output, d_log_norm):
        def function(query, key):
            return attnorm.dot_product_attention(
                query,
                key,
                value,
                normalizer=attnorm.get_normalizer("lp", p=4.0),
                local_window_size=0,
                precision="highest",
                return_log_norm=True,
                implementation="pallas_tpu",
            )

        _, pullback = jax.vjp(function, query, key)
        return pullback((d_output, d_log_norm))

    for seed in range(10):
        rng = np.random.default_rng(seed)
        query, key, value, d_output = rng.normal(size=(4, 1, T, 1, H)).astype(np.float32)
        d_log_norm = rng.normal(size=(1, T, 1)).astype(np.float32)
        with kernels.config(INTERPRET):
            dq, dk = gradients(query, key, value, d_output, d_log_norm)
        weight = H**-0.5 * d_log_norm[..., None]
        assert_near("gradient of query", dq, weight * key, 1e-6)
        assert_near("gradient of key", dk, weight * query, 1e-6)
