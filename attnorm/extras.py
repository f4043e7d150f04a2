"""How to install the packages that a part of attnorm needs and attention itself does not."""


def install_hint(extra: str) -> str:
    """What to type for an extra of pyproject.toml.

    >>> from attnorm.extras import install_hint
    >>> print(install_hint("train"))
    in the checkout: pip install --editable ".[train]"
    """
    return f'in the checkout: pip install --editable ".[{extra}]"'
