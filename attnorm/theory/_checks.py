"""Arguments of bounds. A traced number cannot be checked; it is the caller's to keep in range."""

import math

import jax


def check_p(p: float) -> None:
    if not p > 0:
        raise ValueError(f"p must be positive, got {p}")


def check_finite_p(p: float) -> None:
    if not 0 < p < math.inf:
        raise ValueError(f"p must be positive and finite, got {p}")


def check(name: str, value, wanted: str, accept) -> None:
    """Raises ValueError naming a number that is known now and that ``accept`` refuses."""
    if not isinstance(value, jax.core.Tracer) and not accept(value):
        raise ValueError(f"{name} must be {wanted}, got {value}")


def check_positive(name: str, value) -> None:
    check(name, value, "positive", lambda x: x > 0)


def check_num_keys(num_keys) -> None:
    check("num_keys", num_keys, "at least 1", lambda n: n >= 1)


def check_num_selected(num_selected, num_keys: int) -> None:
    check(
        "num_selected",
        num_selected,
        f"from 1 to {num_keys}, the number of keys",
        lambda n: 1 <= n <= num_keys,
    )
