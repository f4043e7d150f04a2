"""How attention weights are normalised: pure functions, their one-pass rules, and a registry of names."""

from attnorm.normalizers.affine import affine
from attnorm.normalizers.constant import sink, softmax_plus_n
from attnorm.normalizers.general import gelu_l2, general, l2_gelu
from attnorm.normalizers.length import (
    alibi,
    critical,
    llama4,
    log_n,
    scale_invariant,
    sqrt_log_n,
    ssmax,
    yarn,
)
from attnorm.normalizers.lp import l2, linf, lp, softmax
from attnorm.normalizers.nap import nap
from attnorm.normalizers.polynomial import polynomial
from attnorm.normalizers.registry import get_normalizer, normalizer_names
from attnorm.normalizers.relu import relu, reluformer, softplus, squared_relu
from attnorm.normalizers.rule import Normalizer
from attnorm.normalizers.sa_softmax import sa_softmax
from attnorm.normalizers.sigmoid import sigmoid
from attnorm.normalizers.softpick import softpick
from attnorm.normalizers.threshold_rectified import threshold_rectified

__all__ = [
    "Normalizer",
    "affine",
    "alibi",
    "critical",
    "gelu_l2",
    "general",
    "get_normalizer",
    "l2",
    "l2_gelu",
    "linf",
    "llama4",
    "log_n",
    "lp",
    "nap",
    "normalizer_names",
    "polynomial",
    "relu",
    "reluformer",
    "sa_softmax",
    "scale_invariant",
    "sigmoid",
    "sink",
    "softmax",
    "softmax_plus_n",
    "softpick",
    "softplus",
    "sqrt_log_n",
    "squared_relu",
    "ssmax",
    "threshold_rectified",
    "yarn",
]
