"""The kernels with their copies between memories simulated: what is read has arrived, and nothing is written twice."""

import functools

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import attnorm
from attnorm import kernels
from tests.contract.helpers import assert_matches_oracle, make_arrays
from tests.kernels.conftest import SMALL

pytestmark = pytest.mark.slow

T, S = 200, 300
IDS = np.repeat([[0, 1, 2]], [150, 20, 130], axis=1).astype(np.int32)
attend = functools.partial(attnorm.dot_product_attention, implementation="pallas_tpu", precision="highest")


def check(params, **options):
    """Memory that nobody wrote is NaN, and a copy happens as late as it may, so that reading early shows."""
    arrays = make_arrays(B=1, T=T, S=S, N=2, K=1)
    with kernels.config(kernels.Config(forward=SMALL, backward=SMALL, interpret=params)):
        assert_matches_oracle(attend, *arrays, **options)


@pytest.mark.parametrize(
    "options",
    [
        dict(is_causal=True, query_offset=-140),  # the first tile of queries sees nothing
        dict(local_window_size=(40, 10)),
        dict(query_segment_ids=IDS[:, :T], key_value_segment_ids=IDS),
        dict(key_value_seq_lengths=np.array([120], np.int32), normalizer="linf"),
    ],
    ids=["causal", "window", "segments", "lengths"],
)
def test_every_tile_is_there_in_time(options):
    check(pltpu.InterpretParams(), **options)


def test_a_bias_and_a_parameter_per_head():
    query, key, value = make_arrays(B=1, T=130, S=130, N=2, K=1)
    bias = np.random.default_rng(1).normal(size=(1, 2, 130, 1)).astype(np.float32)
    params = {"p": np.array([1.5, 3.0], np.float32)}
    with kernels.config(kernels.Config(forward=SMALL, backward=SMALL, interpret=pltpu.InterpretParams())):
        assert_matches_oracle(attend, query, key, value, bias, normalizer="lp", params=params)


def test_two_cores_do_not_race():
    check(pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2), is_causal=True)
