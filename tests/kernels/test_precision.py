"""Cancellation in the backward pass, and the precision of products."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm import kernels
from attnorm.kernels import gpu_portable
from tests.contract.helpers import assert_near, make_arrays
from tests.kernels.conftest import INTERPRET

PORTABLE = kernels.Config(gpu="portable", interpret=True)
KERNELS = pytest.mark.parametrize(
    "implementation, config", [("pallas_tpu", INTERPRET), ("pallas_gpu", PORTABLE)], ids=["tpu", "gpu"]
)


def program_of(implementation, dtype, **options):
    """The text of the output and its gradients as a program."""
    attend = functools.partial(attnorm.dot_product_attention, implementation=implementation, **options)
    arrays = [jnp.asarray(x, dtype) for x in make_arrays(B=1, T=8, S=8)]
    return str(jax.make_jaxpr(lambda *arrays: jax.vjp(attend, *arrays)[1](arrays[0]))(*arrays))


@KERNELS
def test_the_default_precision_is_that_of_float32_products_alone(implementation, config):
    with kernels.config(config):
        assert "HIGHEST" not in program_of(implementation, jnp.float32)
        with jax.default_matmul_precision("highest"):
            assert "HIGHEST" in program_of(implementation, jnp.float32)
            assert "HIGHEST" not in program_of(implementation, jnp.float32, precision="default")
            assert "HIGHEST" not in program_of(implementation, jnp.bfloat16)


@KERNELS
def test_a_default_that_is_no_level_is_refused_by_name(implementation, config):
    with kernels.config(config), jax.default_matmul_precision("BF16_BF16_F32"):
        with pytest.raises(NotImplementedError, match=f"{implementation}: precision 'BF16_BF16_F32'"):
            program_of(implementation, jnp.float32)


def test_the_default_precision_decides_the_tiles_of_gpus(monkeypatch):
    tilings = []
    tiling = gpu_portable._tiling

    def noted(*arguments):
        tilings.append(tiling(*arguments))
        return tilings[-1]

    monkeypatch.setattr(gpu_portable, "_tiling", noted)

    def of(precision=None):
        tilings.clear()
        x = jnp.ones((1, 128, 1, 128))
        attend = functools.partial(
            attnorm.dot_product_attention, implementation="pallas_gpu", precision=precision
        )
        jax.eval_shape(jax.grad(lambda x: attend(x, x, x).sum()), x)
        return list(tilings)

    with kernels.config(PORTABLE):
        exact, rounded = of("highest"), of()
        with jax.default_matmul_precision("highest"):
            assert of() == exact != rounded


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
