"""Derivatives in terms of the primitives that Mosaic GPU knows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Literal
from jax.extend.core.primitives import add_jaxvals_p


def with_plain_sums(function: Callable, *args: Any) -> Any:
    """``function(*args)``, with ordinary additions where differentiation adds cotangents by a primitive of its own."""
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    results = _run(program, jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _run(program, args):
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))

    def value(x):
        return x.val if isinstance(x, Literal) else values[x]

    for equation in jaxpr.eqns:
        inputs = [value(x) for x in equation.invars]
        # Calls, such as of jitted functions, may hold such sums too.
        called = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if equation.primitive is add_jaxvals_p:
            results = [inputs[0] + inputs[1]]
        elif called is not None:
            results = _run(called, inputs)
        else:
            results = equation.primitive.bind(*inputs, **equation.params)
            results = results if equation.primitive.multiple_results else [results]
        values.update(zip(equation.outvars, results, strict=True))
    return [value(x) for x in jaxpr.outvars]
