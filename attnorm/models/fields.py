"""The fields of a model's config, checked against the types that they are declared with."""

import dataclasses
import numbers
from typing import Any

_KINDS: dict[Any, tuple[type, str]] = {
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    bool: (bool, "True or False"),
    str: (str, "a word"),
}


def require_types(config: Any) -> None:
    """Raises a TypeError that names the first field of a dataclass whose value is of another type.

    Whole numbers are numbers too; True and False are neither.
    """
    for field in dataclasses.fields(config):
        kind, wanted = _KINDS[field.type]
        value = getattr(config, field.name)
        if not isinstance(value, kind) or isinstance(value, bool) != (field.type is bool):
            raise TypeError(f"{field.name} must be {wanted}, got {value!r}")
