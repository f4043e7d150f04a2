"""What implementations do alike with whole rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm.rows import row_products


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_products_of_rows(dtype):
    """18 rows are more than one part; what another row has reaches none."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3, 2, 18, 5)).astype(np.float32)
    a[1, 0, 4] = np.nan
    b = jnp.asarray(b, dtype)
    got = np.asarray(jax.jit(lambda a, b: row_products(a, b, "highest"))(a, b))
    expected = np.sum(a.astype(np.float64) * np.asarray(b, np.float64), axis=-1)
    assert np.isnan(expected).sum() == 1
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
