"""How a task's attention is called over a mesh."""

import logging

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import attnorm
from attnorm.training import attention
from attnorm.training.mesh import AXES


class OtherDevice:
    """Of a platform that programs can be compiled for, and that is not this one."""

    platform, device_kind, process_index = "tpu", "TPU v5", 0

    def __init__(self, number):
        self.id = number


@pytest.fixture
def mesh():
    devices = np.array([OtherDevice(0), OtherDevice(1)]).reshape(1, 1, 2, 1)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 4)


X = np.zeros((1, 8, 2, 4), np.float32)


def test_keys_are_gathered_for_a_normaliser_that_a_ring_does_not_serve(mesh, monkeypatch, caplog):
    calls = []

    def record(query, key, value, **options):
        calls.append((options["normalizer"], options["variant"]))
        return query

    monkeypatch.setattr(attnorm, "ring_attention", record)
    attention._log_once.cache_clear()
    entmax, l2 = map(attnorm.get_normalizer, ("entmax15", "l2"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            attention.make_attention(entmax, mesh)(X, X, X)
        attention.make_attention(l2, mesh)(X, X, X)
        attention.make_attention(entmax, mesh)(X, X, X, normalizer=l2)  # as of learned parameters
    assert calls == [(entmax, "all_gather")] * 2 + [(l2, "ring")] * 2
    assert ["level" in record.getMessage() for record in caplog.records] == [True]


def test_what_a_ring_cannot_do_is_no_reason_to_gather(mesh):
    with pytest.raises(NotImplementedError, match="variant 'ring'"):
        attention.make_attention(attnorm.get_normalizer("l2"), mesh)(X, X, X, implementation="reference")


def test_one_device_that_is_here_needs_no_mesh():
    here = np.array(jax.devices()[:1]).reshape(1, 1, 1, 1)
    own = Mesh(here, AXES, axis_types=(AxisType.Auto,) * 4)
    traced = jax.make_jaxpr(attention.make_attention(attnorm.get_normalizer("l2"), own))(X, X, X)
    assert "shard_map" not in str(traced)
