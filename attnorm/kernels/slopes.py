"""The slopes of a rule's scalar functions over a tile of logits, for the backward kernels on GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def recompute(rule, s, capped, m, translated=lambda function: function):
    """The numerators of a tile of logits, and a function back.

    It takes the gradients of the numerators and of every statistic, against the tile, to those of the products of
    queries and keys (but for the scale) and, if asked to, of the rule's parameters, which are given over the tile.

    Functions of one number have one slope, which is taken forwards: backwards, all that is computed on the way would
    be kept in registers. ``translated`` makes a function one that the kernel's compiler knows.
    """
    parameters, tree = jax.tree.flatten(rule)

    def of_logits(s, m, parameters):
        return _jvp(lambda s: tree.unflatten(parameters).terms(s, m), s)

    def of_parameter(k):
        def terms_and_slopes(s, m, parameters):
            def terms(x):
                return tree.unflatten([*parameters[:k], x, *parameters[k + 1 :]]).terms(s, m)

            return _jvp(terms, parameters[k])

        return terms_and_slopes

    (f, _), slopes = translated(of_logits)(s, m, parameters)

    def back(df, d_stats, with_parameters=False):
        def along(slopes):
            of_f, of_stats = slopes
            return sum((d * x for d, x in zip(d_stats, of_stats, strict=True)), df * of_f)

        ds = along(slopes)
        ds = ds if capped is None else ds * (1 - capped * capped)
        if not with_parameters:
            return ds
        return ds, [along(translated(of_parameter(k))(s, m, parameters)[1]) for k in range(len(parameters))]

    return f, back


def _jvp(function, x):
    return jax.jvp(function, (x,), (jnp.ones_like(x),))
