"""Normalisers as configs and command lines spell them: a name, or a name with parameters."""

import ast
import math
from collections.abc import Mapping

import jax.numpy as jnp

from attnorm.normalizers.registry import get_normalizer
from attnorm.normalizers.rule import Normalizer

_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)


def parse_normalizer(spec: str) -> tuple[str, dict[str, float]]:
    """Name and parameters of ``"l2"``, ``"lp(p=1.5)"``, ``"lp(p=inf)"``.

    Raises:
      ValueError, TypeError: another form, or what :func:`attnorm.get_normalizer` refuses.

    >>> from attnorm.normalizers.spec import parse_normalizer
    >>> parse_normalizer("lp(p=1.5)")
    ('lp', {'p': 1.5})
    """
    wanted = f'must be a name or a name with parameters, such as "l2" or "lp(p=1.5)", got {spec!r}'
    try:
        call = ast.parse(spec if "(" in spec else f"{spec}()", mode="eval").body
    except SyntaxError:
        raise ValueError(wanted) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(wanted)
    params = {}
    for keyword in call.keywords:
        text = ast.unparse(keyword.value)
        try:
            params[keyword.arg] = float(text)
        except ValueError:
            raise ValueError(f"{keyword.arg} must be a number, got {text!r}") from None
        if _FLOAT32_MAX < abs(params[keyword.arg]) < math.inf:
            raise ValueError(f"{keyword.arg} must be a number that float32 can hold, got {text!r}")
    get_normalizer(call.func.id, **params)
    return call.func.id, params


def with_array_parameters(name: str, params: Mapping[str, float]) -> Normalizer:
    """The parameters become arrays: one traced program then serves all their values."""
    try:
        return get_normalizer(name, **{key: jnp.float32(x) for key, x in params.items()})
    except ValueError:
        # Some values, such as p = inf and n = 0, are accepted as numbers only.
        return get_normalizer(name, **params)
