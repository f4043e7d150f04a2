"""No feature of the contract is refused. The compile tests show that each compiles, the grid that each is right."""

import jax
import jax.numpy as jnp
import pytest

from attnorm import kernels
from attnorm.kernels import tpu
from tests.kernels.conftest import INTERPRET
from tests.kernels.features import FEATURES, FUSED, make_call


def test_the_family_of_norms_and_constants_is_fused():
    assert {"softmax", "l2", "lp", "linf", "sink", "softmax_plus_n", "sigmoid", "general"} <= set(FUSED)
    assert not {"ssmax", "gelu_l2", "entmax15", "stick_breaking"} & set(FUSED)


@pytest.mark.parametrize("feature", FEATURES)
def test_it_is_served(feature, monkeypatch):
    served = []

    def attend(query, key, value, *args, **kwargs):
        served.append((query.shape, key.shape))
        return jnp.zeros((*query.shape[:3], value.shape[3]), query.dtype), jnp.zeros(query.shape[:3])

    monkeypatch.setattr(tpu, "attend", attend)
    call, arrays, rule = make_call(feature, implementation="pallas_tpu")
    with kernels.config(INTERPRET):
        jax.eval_shape(call, arrays, rule)
    assert served == [(arrays["query"].shape, arrays["key"].shape)]
