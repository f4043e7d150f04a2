"""A rule's functions and their derivatives, in terms of what Mosaic GPU computes, and computes well."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal
from jax.extend.core.primitives import add_jaxvals_p, integer_pow_p, log1p_p, stop_gradient_p, tanh_p

# Below, the difference of two numbers near 1 has lost digits, and its series to x^7 is exact.
_TANH_BY_SERIES = 0.2


def tanh(x):
    """By exp, or near 0 by its series: the hardware's own has 11 bits."""
    square = x * x
    series = 1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315)))
    return jnp.where(jnp.abs(x) < _TANH_BY_SERIES, x * series, 1 - 2 / (jnp.exp(2 * x) + 1))


def _log1p(x):
    # The hardware's logarithm is good to an absolute error near 1, so the series takes over there.
    return jnp.where(jnp.abs(x) < 0.03, x * (1 - x * (1 / 2 - x * (1 / 3 - x / 4))), jnp.log(1 + x))


def _integer_pow(x, y):
    if y < 0:
        return 1 / _integer_pow(x, -y)
    return x if y == 1 else jax.lax.integer_pow(x, y)


# Of primitives: functions of their inputs and parameters.
_TRANSLATIONS = {
    add_jaxvals_p: lambda a, b: a + b,
    stop_gradient_p: lambda x: x,
    integer_pow_p: _integer_pow,
    tanh_p: lambda x, accuracy: tanh(x),
    log1p_p: lambda x, accuracy: _log1p(x),
}


def translated(function: Callable) -> Callable:
    """The same function of trees of arrays, for use where no more gradients are taken."""

    def call(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        results = _run(program, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _run(program, args):
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))

    def value(x):
        return x.val if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        inputs = [value(x) for x in equation.invars]
        # Calls, such as of jitted functions, may hold more of the same.
        called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive in _TRANSLATIONS:
            results = [_TRANSLATIONS[equation.primitive](*inputs, **equation.params)]
        elif called is not None:
            results = _run(called, inputs)
        else:
            results = equation.primitive.bind(*inputs, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [value(x) for x in jaxpr.outvars]
