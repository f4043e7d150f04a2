"""What is asked of every normaliser by its name in the registry, so that ``-k NAME`` tests a new one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from tests import oracles

NAMES = attnorm.normalizer_names()
KEYS = 7
SHIFTS = (-50, -10, 10, 50)
# Shifts at which weights are 0 in float32 alone, as the docstring says.
VANISHING = {"gelu_l2": (-50, -10)}
LOGITS = np.random.default_rng(3).uniform(-1, 1, KEYS)


def weights_in_double(name, logits, params):
    """By the formula, of rows of logits whose query stands at the last key; what float64 cannot hold is NaN or 0."""
    with np.errstate(all="ignore"):
        row = oracles.Row.of(np.arange(KEYS), KEYS - 1)
        return np.array([oracles.row_weights(name, s, row, params)[0] for s in logits.astype(np.float64)])


def test_formulas_are_of_registered_names_and_of_one_kind():
    assert set(oracles.ORACLES | oracles.FORMULAS) <= set(NAMES)
    assert not set(oracles.ORACLES) & set(oracles.FORMULAS)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_a_public_function_and_has_a_formula(name):
    wanted = f"a function {name} in __all__ of attnorm/normalizers/__init__.py"
    assert name in attnorm.__all__ and callable(getattr(attnorm, name)), wanted
    assert oracles.choices(name)


@pytest.mark.parametrize("name", NAMES)
def test_no_digits_are_lost_far_from_zero(name):
    """In float32, where all logits of a row are very negative, or large: to 4e-6 of the row's largest weight."""
    logits = (LOGITS + np.array(SHIFTS)[:, None]).astype(np.float32)
    _, params = oracles.choices(name)[0]
    params = {k: x if isinstance(x, str | int) else float(np.mean(x)) for k, x in params.items()}
    got = np.asarray(attnorm.get_normalizer(name, **params).weights(logits), np.float64)
    assert np.isfinite(got).all()
    for shift, ours, expected in zip(SHIFTS, got, weights_in_double(name, logits, params), strict=True):
        largest = np.max(np.abs(expected))
        if largest > 0 and shift not in VANISHING.get(name, ()):  # neither 0 nor NaN
            error = np.max(np.abs(ours - expected)) / largest
            assert error <= 4e-6, (
                f"weights of {name} at logits of {shift} ± 1 differ by {error:.1g} of their largest from the formula: "
                "terms in float32 lose their digits there; see attnorm/normalizers/rule.py, on exp of a mapped logit"
            )


CARRIED = [
    name
    for name in NAMES
    if "rows" not in (rule := attnorm.get_normalizer(name)).needs
    and type(rule).carry is attnorm.Normalizer.carry
]


@pytest.mark.parametrize("name", CARRIED)
def test_its_factors_carry_its_terms_from_one_reference_to_another(name):
    rule = attnorm.get_normalizer(name)
    m_old, m_new = jnp.float32(2), jnp.float32(3.5)
    f, stats = rule.terms(jnp.float32(LOGITS), m_old)
    factor, factors = rule.rescale(m_old, m_new)
    got = f * factor, tuple(h * r for h, r in zip(stats, factors, strict=True))
    for ours, expected in zip(
        jax.tree.leaves(got), jax.tree.leaves(rule.terms(jnp.float32(LOGITS), m_new)), strict=True
    ):
        np.testing.assert_allclose(
            ours,
            expected,
            rtol=2e-6,
            err_msg=f"rescale of {name} must give the factors from terms(s, {m_old}) to terms(s, {m_new}): "
            "the one of Normalizer serves exp(c (s - m)) alone",
        )


def test_gelu_l2_vanishes_where_float32_cannot_hold_its_squares():
    """Though the formula has weights there."""
    logits = (LOGITS - 20).astype(np.float32)
    assert np.max(np.abs(weights_in_double("gelu_l2", logits[None], {}))) > 1
    np.testing.assert_array_equal(attnorm.gelu_l2(jnp.asarray(logits)), 0)
