"""Normalisers as configs and command lines spell them: a name, or a name with parameters."""

import ast
import math
from collections.abc import Mapping

import jax.numpy as jnp

from attnorm.normalizers.registry import get_normalizer, text_parameters
from attnorm.normalizers.rule import Normalizer

_FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)


def parse_normalizer(spec: str) -> tuple[str, dict[str, float | str]]:
    """Name and parameters of ``"l2"``, ``"lp(p=1.5)"``, ``"lp(p=inf)"``, ``"general(F=relu, p=2)"``.

    Raises:
      ValueError, TypeError: another form, or what :func:`attnorm.get_normalizer` refuses.

    >>> from attnorm.normalizers.spec import parse_normalizer
    >>> parse_normalizer("lp(p=1.5)")
    ('lp', {'p': 1.5})
    """
    wanted = f'normalizer must be a name or a name with parameters, such as "l2" or "lp(p=1.5)", got {spec!r}'
    try:
        call = ast.parse(spec if "(" in spec else f"{spec}()", mode="eval").body
    except SyntaxError:
        raise ValueError(wanted) from None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
        raise ValueError(wanted)
    params: dict[str, float | str] = {}
    for keyword in call.keywords:
        if keyword.arg is None:  # **
            raise ValueError(wanted)
        text = ast.unparse(keyword.value)
        if keyword.arg in text_parameters(call.func.id):
            params[keyword.arg] = text
            continue
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"{keyword.arg} must be a number, got {text!r}") from None
        if _FLOAT32_MAX < abs(number) < math.inf:
            raise ValueError(f"{keyword.arg} must be a number that float32 can hold, got {text!r}")
        params[keyword.arg] = number
    get_normalizer(call.func.id, **params)
    return call.func.id, params


def with_array_parameters(name: str, params: Mapping[str, float | str]) -> Normalizer:
    """The numbers become arrays: one traced program then serves all their values."""
    try:
        arrays = {key: jnp.float32(x) for key, x in params.items() if not isinstance(x, str)}
        return get_normalizer(name, **dict(params) | arrays)
    except ValueError:
        # Some values, such as p = inf, n = 0 and whole powers, are accepted as numbers only.
        return get_normalizer(name, **params)
