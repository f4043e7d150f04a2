"""Arithmetic that attention in plain JAX does in its own way, against the plain way."""

import jax.numpy as jnp
import numpy as np

from attnorm.tile_layout import Operands, as_operand


def test_rounding_to_bfloat16_is_that_of_a_cast():
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20000, dtype=np.uint32)
    bits[:5000] &= 0xFFFF8000  # ties, and numbers that bfloat16 has
    bits[:2] = 0x7FFFFFFF, 0xFFFFFFFF  # NaN that a carry would turn into zeros
    bits[2:6] = 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x80000001  # infinite, or soon; a subnormal
    x = bits.view(np.float32)
    got = np.asarray(as_operand(jnp.asarray(x), Operands.of(jnp.bfloat16, 1.0)))
    with np.errstate(invalid="ignore"):
        expected = x.astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(x))
    keep = ~np.isnan(x)
    np.testing.assert_array_equal(got.view(np.uint16)[keep], expected.view(np.uint16)[keep])
