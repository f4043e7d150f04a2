"""The slopes of a rule's scalar functions over a tile of logits, for the backward kernels on GPUs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from attnorm.kernels.tile import rule_tiles

# Backwards, all that is computed on the way to a slope is kept in registers. A rule that keeps more tiles than this has
# its slopes taken forwards, which is more work: by what compiled without spilling.
MOST_KEPT = 13


def recompute(rule, s, capped, m, translated=lambda function: function):
    """The numerators of a tile of logits, and a function back.

    It takes the gradients of the numerators and of every statistic, against the tile, to those of the products of
    queries and keys (but for the scale) and to a list of those of the rule's parameters, which are given over the tile.
    ``translated`` makes a function one that the kernel's compiler knows.
    """
    is_light = rule_tiles(rule, backward=True) <= MOST_KEPT
    f, pull = (_backwards if is_light else _forwards)(rule, s, m, translated)

    def back(df, d_stats):
        ds, d_rule = pull(df, d_stats)
        return ds if capped is None else ds * (1 - capped * capped), d_rule

    return f, back


def _backwards(rule, s, m, translated):
    def numerators_and_pull(s, m, rule):
        (f, _), pull = jax.vjp(lambda s, rule: rule.terms(s, m), s, rule)
        return f, pull

    f, pull = translated(numerators_and_pull)(s, m, rule)

    def back(df, d_stats):
        ds, d_rule = translated(pull)((df, tuple(jnp.broadcast_to(d, s.shape) for d in d_stats)))
        return ds, jax.tree.leaves(d_rule)

    return f, back


def _forwards(rule, s, m, translated):
    parameters, tree = jax.tree.flatten(rule)

    def numerators_and_slopes(k):
        """With respect to parameter k, or to s, which stands after the last."""

        def terms_and_slopes(m, *numbers):
            def terms(x):
                own = (*numbers[:k], x, *numbers[k + 1 :])
                return tree.unflatten(own[:-1]).terms(own[-1], m)

            return jax.jvp(terms, (numbers[k],), (jnp.ones_like(s),))

        (f, _), slopes = translated(terms_and_slopes)(m, *parameters, s)
        return f, slopes

    f, of_s = numerators_and_slopes(len(parameters))

    def back(df, d_stats):
        def along(slopes):
            of_f, of_stats = slopes
            return sum((d * x for d, x in zip(d_stats, of_stats, strict=True)), df * of_f)

        return along(of_s), [along(numerators_and_slopes(k)[1]) for k in range(len(parameters))]

    return f, back
