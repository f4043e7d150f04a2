"""Attention with every normaliser that has a published formula, against the float64 oracle."""

import functools

import numpy as np
import pytest

import attnorm
from attnorm import chunked
from attnorm.attention import implementations_of
from tests import oracles
from tests.contract.helpers import assert_results_near, make_arrays, make_cotangents, oracle, run
from tests.oracles import FORMULAS

T, S = 20, 29
# Each choice of parameters under one of these, in turn.
RESTRICTIONS = [
    {"is_causal": True, "query_offset": np.array([7, 3], np.int32)},
    {"mask": np.random.default_rng(5).random((2, 1, T, S)) < 0.6},
    {"local_window_size": (6, 4), "key_value_seq_lengths": np.array([S, 11], np.int32)},
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
    output, log_norm, gradients = run(attend, arrays, **options)
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
