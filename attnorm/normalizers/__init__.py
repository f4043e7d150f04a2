"""How attention weights are normalised: pure functions, their one-pass rules, and a registry of names."""

from attnorm.normalizers.adaptive_temperature import adaptive_temperature
from attnorm.normalizers.affine import affine
from attnorm.normalizers.constant import sink, softmax_plus_n
from attnorm.normalizers.elastic import elastic
from attnorm.normalizers.entmax import asentmax, entmax, entmax15, sparsemax, stieltjes
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
from attnorm.normalizers.stick_breaking import stick_breaking
from attnorm.normalizers.threshold_rectified import threshold_rectified
from attnorm.normalizers.top_k import top_k

__all__ = [
    "Normalizer",
    "adaptive_temperature",
    "affine",
    "alibi",
    "asentmax",
    "critical",
    "elastic",
    "entmax",
    "entmax15",
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
    "sparsemax",
    "sqrt_log_n",
    "squared_relu",
    "ssmax",
    "stick_breaking",
    "stieltjes",
    "threshold_rectified",
    "top_k",
    "yarn",
]
