"""Any function F of the logits in place of exp: weights ``F(s_j) / (Σ_k |F(s_k)|^p)^(1/p)``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned
from attnorm.normalizers.lp import LOWEST_DIFFERENCE, LOWEST_LEARNED, Lp
from attnorm.normalizers.rule import Normalizer, checked_parameter, is_array, of_weighted, static_field

# Of float32 logits, products with 1/T neither overflow nor lose what is hidden.
_T_RANGE = (1e-20, 1e20)


@jax.custom_jvp
def _gelu(x):
    return jax.nn.gelu(x, approximate=False)


@_gelu.defjvp
def _gelu_jvp(primals, tangents):
    """Written out, because JAX 0.12 cannot take the slope of erf inside shard_map."""
    (x,), (dx,) = primals, tangents
    density = jnp.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return _gelu(x), dx * (jax.lax.erfc(-x * math.sqrt(0.5)) / 2 + x * density)


FUNCTIONS: dict[str, Callable[[Array], Array]] = {
    "softplus": jax.nn.softplus,
    "sigmoid": jax.nn.sigmoid,
    "one_plus_square": lambda x: 1 + jnp.square(x),
    "relu": jax.nn.relu,
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "gelu": _gelu,
}


@dataclass(frozen=True)
class _OfTemperature(Lp):
    p: float | Array = 1.0
    T: float | Array = 1.0

    learned = {"p": Learned(1.0, low=LOWEST_LEARNED), "T": Learned(1.0, low=0.0)}
    # The norm is one of F, not of exp(s).
    log_norm = Normalizer.log_norm

    def __post_init__(self):
        super().__post_init__()
        low, high = _T_RANGE
        wanted = f"positive, from {low:g} to {high:g}"
        object.__setattr__(
            self, "T", checked_parameter("T", self.T, wanted, lambda T: (T >= low) & (T <= high))
        )


@dataclass(frozen=True)
class GeneralExp(_OfTemperature):
    """The rule of :func:`general` for F = exp, whose maximum can be taken out."""

    def terms(self, s, m):
        return super().terms(jnp.maximum(s - m, LOWEST_DIFFERENCE) / self.T, 0)


@dataclass(frozen=True)
class General(_OfTemperature):
    """The rule of :func:`general` for any other F: f = F(s / T), h = \\|f\\|^p, g = h^(-1/p)."""

    F: str = static_field("softplus")

    uses_max = False
    needs_equal_logits = False

    @property
    def needs(self):
        return frozenset({"erf"}) if self.F == "gelu" else frozenset()

    def terms(self, s, m):
        def of_finite(s):
            f = FUNCTIONS[self.F](s / self.T)
            return f, (_power(jnp.abs(f), self.p),)

        return of_weighted(of_finite, s)


def _power(size, p):
    if not is_array(p) and p in (1, 2):
        return size if p == 1 else size * size
    positive = size > 0
    return jnp.where(positive, jnp.exp(p * jnp.log(jnp.where(positive, size, 1))), 0)


def make_general(F: str = "softplus", p: float | Array = 1.0, T: float | Array = 1.0) -> Normalizer:
    """The rule of :func:`general`."""
    if F == "exp":
        return GeneralExp(p, T)
    if F not in list(FUNCTIONS):
        raise ValueError(f"F must be one of {['exp', *FUNCTIONS]}, got {F!r}")
    return General(p, T, F)


@dataclass(frozen=True)
class GeluL2(Normalizer):
    """The rule of :func:`gelu_l2`: f = gelu(s), statistics f² and 1."""

    uses_max = False
    needs = frozenset({"erf"})

    def terms(self, s, m):
        def of_finite(s):
            f = _gelu(s)
            return f, (f * f, jnp.ones_like(s))

        return of_weighted(of_finite, s)

    def finalize(self, stats, m):
        squares, count = stats
        return jnp.where(squares > 0, jnp.sqrt(count) * jax.lax.rsqrt(jnp.where(squares > 0, squares, 1)), 0)


@dataclass(frozen=True)
class L2Gelu(Normalizer):
    """:func:`l2_gelu` needs the norm of the logits before their gelu, so two passes."""

    passes = 2
    needs = frozenset({"rows", "count"})

    def row_weights(self, s, visible, place, axis):
        squares = jnp.sum(jnp.where(visible, s * s, 0), axis, keepdims=True)
        inverse = jnp.where(squares > 0, jax.lax.rsqrt(jnp.where(squares > 0, squares, 1)), 0)
        return _gelu(s * inverse * jnp.sqrt(place.count))


def general(
    logits: Float[Array, "..."],
    *,
    F: str = "softplus",
    p: float | Array = 1.0,
    T: float | Array = 1.0,
    axis: int = -1,
    where: Bool[Array, "..."] | None = None,
) -> Float[Array, "..."]:
    """Any F in place of exp, any norm: ``F(s_j / T) / (Σ_k |F(s_k / T)|^p)^(1/p)``.

    Args:
      logits: floating point, any shape.
      F: ``"exp"``, ``"softplus"``, ``"sigmoid"``, ``"one_plus_square"`` (1 + s²), ``"relu"``, ``"squared_relu"``
        or ``"gelu"`` (exact, signed).
      p: the norm that is 1, as in :func:`attnorm.lp`, below infinity.
      T: the temperature, from 1e-20 to 1e20; like p a number, or an array that receives its exact gradient.
      axis: the axis of the keys.
      where: boolean, broadcasts to the logits; keys where it is False are as if removed.

    Returns:
      The weights, in the logits' shape and dtype. 0 in rows where every F is 0. But for ``"exp"`` no maximum is
      taken out: Σ |F|^p must fit in float32, so at logits of 1e4 p may be 4 at most for the squares, and F of very
      negative logits underflows to 0.

    Raises:
      TypeError: a dtype that is not accepted.
      ValueError: an unknown F, p or T out of range, a shape that does not broadcast.

    Source: arXiv 2508.17821 for p = 1; "Attention Normalizes the Wrong Norm", convergentthinking.sh, for the norm.

    >>> import jax.numpy as jnp
    >>> from attnorm import general
    >>> print(general(jnp.array([-1.0, 0.0, 1.0, 3.0]), F="relu"))
    [0.   0.   0.25 0.75]
    """
    return make_general(F, p, T).weights(logits, axis=axis, where=where)


def gelu_l2(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """L2-normalised gelu: ``sqrt(n) gelu(s_j) / sqrt(Σ_k gelu(s_k)²)``, n the number of keys. Signed.

    0 in rows of logits that are all below -9 or so: float32 cannot hold the squares of their gelu. Arguments and errors
    as in :func:`attnorm.lp`.

    Source: "gelu_l2_norm" in the code of TokenFormer, arXiv 2410.23168.

    >>> import jax.numpy as jnp
    >>> from attnorm import gelu_l2
    >>> print(gelu_l2(jnp.ones(3)))
    [1. 1. 1.]
    """
    return GeluL2().weights(logits, axis=axis, where=where)


def l2_gelu(
    logits: Float[Array, "..."], *, axis: int = -1, where: Bool[Array, "..."] | None = None
) -> Float[Array, "..."]:
    """Gelu of L2-normalised logits: ``gelu(sqrt(n) s_j / sqrt(Σ_k s_k²))``, n the number of keys. Signed.

    Two passes over the keys, so no kernel serves it. Arguments and errors as in :func:`attnorm.lp`.

    Source: TokenFormer, arXiv 2410.23168, "l2_norm_gelu" in its code.

    >>> import jax.numpy as jnp
    >>> from attnorm import l2_gelu
    >>> [round(float(x), 4) for x in l2_gelu(jnp.array([5.0, 5.0]))]
    [0.8413, 0.8413]
    """
    return L2Gelu().weights(logits, axis=axis, where=where)
