"""Where a token stands: rotary frequencies and rotations, and ALiBi as extra features of queries and keys."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

ROPE_SCALINGS = ("none", "linear", "yarn")

# YaRN keeps the frequencies that turn at least 32 times within the original length, interpolates those that turn
# at most once, and blends in between.
_YARN_FEWEST_TURNS, _YARN_MOST_TURNS = 1.0, 32.0
_ALIBI_BLOCK = 256  # bfloat16 holds whole numbers up to 256
ALIBI_FEATURES = 4  # that ALiBi adds to queries and keys


def rope_frequencies(
    num_features: int,
    *,
    base: float = 10000.0,
    scaling: str = "none",
    factor: float = 1.0,
    original_length: int = 0,
) -> Float[np.ndarray, "R/2"]:
    r"""The angle per position of each pair of features: ``base^(-2i/R)``, i = 0, ..., R/2 - 1, scaled.

    Args:
      num_features: R, how many features of a head are rotated; even.
      base: of the frequencies.
      scaling: "none"; "linear", all frequencies divided by the factor (position interpolation, arXiv 2306.15595); or
        "yarn", only those that turn little within the original length (arXiv 2309.00071, section 3.2).
      factor: by how much the length grows.
      original_length: tokens, for "yarn".

    >>> from attnorm.models.positions import rope_frequencies
    >>> rope_frequencies(4, base=100.0)
    array([1. , 0.1])
    """
    frequencies = base ** (-np.arange(0, num_features, 2) / num_features)
    if scaling == "none":
        return frequencies
    if scaling == "linear":
        return frequencies / factor
    turns = original_length * frequencies / (2 * math.pi)
    kept = np.clip((turns - _YARN_FEWEST_TURNS) / (_YARN_MOST_TURNS - _YARN_FEWEST_TURNS), 0, 1)
    return kept * frequencies + (1 - kept) * frequencies / factor


def yarn_logit_factor(factor: float) -> float:
    """What YaRN multiplies the logits by: ``(0.1 ln factor + 1)^2``.

    Source: arXiv 2309.00071, section 3.4.
    """
    return (0.1 * math.log(factor) + 1) ** 2


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], frequencies: Float[np.ndarray, "R/2"]
) -> Float[Array, "B T N H"]:
    """The first R features of every head turned by their angles; feature i is paired with i + R/2.

    Inner products of rotated vectors depend on positions through their difference alone.

    Source: RoFormer, arXiv 2104.09864; the pairing is that of GPT-NeoX and LLaMA.
    """
    num_pairs = len(frequencies)
    angles = positions[..., None, None].astype(jnp.float32) * jnp.asarray(frequencies, jnp.float32)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second, rest = jnp.split(x.astype(jnp.float32), (num_pairs, 2 * num_pairs), axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return turned.astype(x.dtype)


def alibi_slopes(num_heads: int) -> Float[np.ndarray, "N"]:
    """The slope of each head: ``2^(-8n/N)``, n = 1, ..., N.

    Where N is no power of two, those of the power of two below, then every other one of the power of two above.

    Source: arXiv 2108.12409.

    >>> from attnorm.models.positions import alibi_slopes
    >>> alibi_slopes(2)
    array([0.0625    , 0.00390625])
    """
    below = 2 ** int(math.log2(num_heads))
    slopes = 2.0 ** (-8 * np.arange(1, below + 1) / below)
    between = 2.0 ** (-8 * np.arange(1, 2 * below, 2) / (2 * below))
    return np.concatenate([slopes, between])[:num_heads]


def with_alibi(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    positions: Int[Array, "B T"],
    scale: float,
) -> tuple[Float[Array, "B T N H+4"], Float[Array, "B S K H+4"]]:
    """Queries and keys whose scaled products have ``-slope_n (i - j)`` added; T = S.

    As four more features, not as a bias: that would take O(T S) memory. A position enters as a multiple of 256 and a
    rest, which bfloat16 holds exactly; what it rounds is the term of the query's own position, the same for all keys.
    """
    coarse = (positions // _ALIBI_BLOCK * _ALIBI_BLOCK).astype(jnp.float32)
    fine = (positions % _ALIBI_BLOCK).astype(jnp.float32)
    one = jnp.ones_like(fine)
    key_extra_BxSx4 = jnp.stack([coarse, fine, one, one], axis=-1)

    # Rounded here already, so that both terms of a product use the same slope.
    slopes = jnp.asarray(alibi_slopes(query.shape[2]) / scale, query.dtype).astype(jnp.float32)
    own = -slopes * positions[..., None].astype(jnp.float32)
    rounded = own.astype(query.dtype).astype(jnp.float32)
    slopes = jnp.broadcast_to(slopes, own.shape)
    query_extra_BxTxNx4 = jnp.stack([slopes, slopes, rounded, own - rounded], axis=-1)

    key_extra = jnp.broadcast_to(key_extra_BxSx4[:, :, None], (*key.shape[:3], 4))
    return (
        jnp.concatenate([query, query_extra_BxTxNx4.astype(query.dtype)], axis=-1),
        jnp.concatenate([key, key_extra.astype(key.dtype)], axis=-1),
    )
