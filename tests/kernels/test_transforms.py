"""JAX transformations of the kernels, interpreted: the contract's tests, and what tables in scalar memory add."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from tests.contract import test_transforms
from tests.contract.helpers import assert_near, make_arrays
from tests.contract.test_transforms import (  # noqa: F401
    test_a_scan_over_layers,
    test_jacrev_is_the_same_everywhere,
    test_jit_and_no_jit_agree,
    test_remat_changes_no_gradient,
    test_vmap_along_other_axes,
)

pytestmark = pytest.mark.slow

IDS = np.sort(np.random.default_rng(0).integers(0, 4, (3, 2, 50)), axis=-1).astype(np.int32)
RESTRICTIONS = {
    "offset": dict(query_offset=np.array([-4, 0, 9], np.int32)),
    "lengths": dict(
        query_seq_lengths=np.array([[20, 3], [0, 20], [7, 7]], np.int32),
        key_value_seq_lengths=np.array([[30, 1], [30, 5], [13, 0]], np.int32),
    ),
    "segments": dict(query_segment_ids=IDS[..., :20], key_value_segment_ids=IDS[..., 20:]),
}


def test_shard_map(attend):
    # JAX's plain interpreter of kernels has no rules for check_vma: see test_sharding and the compile tests.
    test_transforms.test_shard_map_on_one_device(attend, check_vma=False)


@pytest.mark.parametrize("mapped", [("query",), ("bias", "mask"), test_transforms.NAMES], ids="-".join)
def test_vmap_of_the_gradient(attend, mapped):
    test_transforms.test_vmap_of_the_gradient_over_any_argument(attend, mapped)


@pytest.mark.parametrize("name", RESTRICTIONS)
def test_vmap_of_the_gradient_over_restrictions(attend, name):
    arrays = make_arrays(T=20, S=30)

    def gradients(attend, restrictions):
        def loss(arrays):
            output, log_norm = attend(*arrays, is_causal=True, return_log_norm=True, **restrictions)
            return jnp.sum(output**2) + jnp.sum(jnp.where(jnp.isfinite(log_norm), jnp.sin(log_norm), 0))

        return jax.grad(loss)(arrays)

    reference = functools.partial(
        attnorm.dot_product_attention, implementation="reference", precision="highest"
    )
    got, expected = (
        jax.jit(jax.vmap(functools.partial(gradients, f)))(RESTRICTIONS[name]) for f in (attend, reference)
    )
    for a, b in zip(got, expected, strict=True):
        assert all(np.abs(b[k]).max() > 0 for k in range(3))
        assert_near("mapped gradient", a, b, 2e-6)
