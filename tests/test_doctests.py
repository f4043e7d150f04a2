"""Every example in a docstring of the package runs and prints what it says."""

import doctest
import importlib
import pkgutil

import pytest

import attnorm.theory.identities


def module_names():
    names = [module.name for module in pkgutil.walk_packages(attnorm.__path__, "attnorm.")]
    return ["attnorm", *(name for name in names if not name.endswith(".__main__"))]


@pytest.mark.parametrize("name", module_names())
def test_examples_of_module(name):
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_the_examples_are_found():
    """Else the test above would pass on nothing."""
    assert {"attnorm.normalizers.lp", "attnorm.theory.identities"} <= set(module_names())
    assert doctest.testmod(attnorm.theory.identities).attempted > 10
