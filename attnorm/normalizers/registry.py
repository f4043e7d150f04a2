"""The normalisers by name: a new one is a line here, and configs, benchmarks and contract tests know it.

Beside the rule it has a function of that name in this folder, with the rule's parameters, the formula in double
backticks and a line ``Source:`` in its docstring, exported by ``__init__.py`` (import and ``__all__``); its formula in
``FORMULAS`` of tests/oracles.py; and a row in the tables of README.md and attnorm/bench/README.md, which
``python -m attnorm.catalogue`` prints, the second with ``--costs``, from what
``python -m attnorm.bench --cost --normalizers NAME --out attnorm/bench/results/cost.json`` measures.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

from attnorm.normalizers.adaptive_temperature import AdaptiveTemperature
from attnorm.normalizers.affine import Affine
from attnorm.normalizers.constant import Sink, SoftmaxPlusN
from attnorm.normalizers.elastic import Elastic
from attnorm.normalizers.entmax import ASEntmax, Stieltjes, make_entmax15, make_sparsemax
from attnorm.normalizers.general import GeluL2, L2Gelu, make_general
from attnorm.normalizers.learned import Learned
from attnorm.normalizers.length import (
    ALiBi,
    Critical,
    Llama4,
    LogN,
    ScaleInvariant,
    SqrtLogN,
    SSMax,
    YaRN,
)
from attnorm.normalizers.lp import LInf, Lp, make_lp
from attnorm.normalizers.nap import NAP
from attnorm.normalizers.polynomial import Polynomial
from attnorm.normalizers.relu import ReLUFormer, make_relu, make_softplus, make_squared_relu
from attnorm.normalizers.rule import Normalizer
from attnorm.normalizers.sa_softmax import SASoftmax
from attnorm.normalizers.sigmoid import make_sigmoid
from attnorm.normalizers.softpick import Softpick
from attnorm.normalizers.stick_breaking import StickBreaking
from attnorm.normalizers.threshold_rectified import ThresholdRectified
from attnorm.normalizers.top_k import TopK
from attnorm.normalizers.tsallis import Tsallis

_RULES: dict[str, Callable[..., Normalizer]] = {
    "softmax": lambda: Lp(1.0),
    "l2": lambda: Lp(2.0),
    "lp": make_lp,
    "linf": LInf,
    "softmax_plus_n": SoftmaxPlusN,
    "sink": Sink,
    "ssmax": SSMax,
    "log_n": LogN,
    "sqrt_log_n": SqrtLogN,
    "critical": Critical,
    "yarn": YaRN,
    "llama4": Llama4,
    "scale_invariant": ScaleInvariant,
    "alibi": ALiBi,
    "sa_softmax": SASoftmax,
    "affine": Affine,
    "general": make_general,
    "gelu_l2": GeluL2,
    "l2_gelu": L2Gelu,
    "sigmoid": make_sigmoid,
    "relu": make_relu,
    "squared_relu": make_squared_relu,
    "softplus": make_softplus,
    "reluformer": ReLUFormer,
    "softpick": Softpick,
    "nap": NAP,
    "threshold_rectified": ThresholdRectified,
    "polynomial": Polynomial,
    "sparsemax": make_sparsemax,
    "entmax15": make_entmax15,
    "entmax": Tsallis,
    "stieltjes": Stieltjes,
    "asentmax": ASEntmax,
    "elastic": Elastic,
    "adaptive_temperature": AdaptiveTemperature,
    "top_k": TopK,
    "stick_breaking": StickBreaking,
}

# Functions of attnorm.normalizers.matrix, which have no rule.
_OF_MATRICES = ("selective", "differential", "sinkhorn")


def normalizer_names() -> tuple[str, ...]:
    """The names that :func:`get_normalizer` knows.

    >>> from attnorm import normalizer_names
    >>> "l2" in normalizer_names()
    True
    """
    return tuple(_RULES)


def text_parameters(name: str) -> set[str]:
    """The parameters of a normaliser that are words, such as ``F`` of :func:`attnorm.general`."""
    if name not in _RULES:
        return set()
    parameters = inspect.signature(_RULES[name]).parameters.values()
    return {param.name for param in parameters if isinstance(param.default, str)}


def learned_parameters(name: str, **params) -> dict[str, Learned]:
    """Which parameters of the normaliser of that name can be learned, and how.

    >>> from attnorm.normalizers.registry import learned_parameters
    >>> learned_parameters("sink")
    {'b': Learned(init=0.0, low=-inf, high=inf)}
    """
    learned = get_normalizer(name, **params).learned
    return {param: learned[param] for param in inspect.signature(_RULES[name]).parameters if param in learned}


def get_normalizer(name: str, **params) -> Normalizer:
    """The normaliser of that name, with its parameters.

    Args:
      name: one of :func:`normalizer_names`.
      **params: the parameters of the function of that name, as ``p`` of :func:`attnorm.lp`. Python numbers are
        static; arrays are pytree leaves, which can be traced, mapped and differentiated, and which the attention
        takes as a scalar or per head, shape (N,).

    Raises:
      ValueError: an unknown name, or a parameter out of range.
      TypeError: a parameter that the normaliser does not have, or of a wrong type.

    >>> from attnorm import get_normalizer
    >>> get_normalizer("lp", p=3)
    Lp(p=3.0)
    """
    if not isinstance(name, str):
        raise TypeError(f"normalizer must be a name, got {name!r}")
    if name not in _RULES:
        close = difflib.get_close_matches(name.lower(), _RULES, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        if name in _OF_MATRICES:
            hint = f" ({name} needs more than a row of logits: attnorm.normalizers.matrix.{name}, for dense weights)"
        base = name.partition("(")[0]
        if base != name and base in _RULES:
            hint = f" (parameters are given by keyword: get_normalizer({base!r}, ...))"
        raise ValueError(
            f"normalizer must be one of normalizer_names(), got {name!r}{hint}; they are {', '.join(_RULES)}"
        )
    accepted = inspect.signature(_RULES[name]).parameters
    for param in params:
        if param not in accepted:
            raise TypeError(f"normalizer {name!r} has parameters {list(accepted)}, got {param!r}")
    return _RULES[name](**params)
