"""Bounds are compared in float64, where a violation is not a rounding error."""

import jax
import pytest


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield
