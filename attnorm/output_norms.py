"""What can be done to the output of attention: normalise it, rescale it, or gate it.

``output`` has shape (..., T, N, Hv), as :func:`attnorm.dot_product_attention` returns it; statistics are in float32
or wider, and results in the output's dtype. L_p softmax differs from softmax by one positive factor per query and
head, so :func:`head_rms` of the output is the same for every p, and :func:`rescale_sqrt_position` is the control for L2.
"""

from __future__ import annotations

import numbers

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from attnorm.normalizers.rule import checked_floating


def head_rms(
    output: Float[Array, "*batch N H"], *, gain: Float[Array, "#N #H"] | None = None, eps: float = 1e-5
) -> Float[Array, "*batch N H"]:
    """Each head's output over its root mean square: ``out / sqrt(mean(out²) + ε)``, times ``gain``.

    Args:
      output: floating point, heads and head dims last.
      gain: broadcasts to (N, Hv); learned, from 1.
      eps: what keeps an output of 0 at 0. For uncorrelated values of variance 1, softmax over n equal keys has mean
        square 1/n, so ε = 1e-5 shrinks the result by 1 % at n = 2048, by 13 % at n = 32768.

    Raises:
      TypeError: an output that is not floating point.
      ValueError: eps that is not positive, an output without a head axis, or a gain that does not broadcast to it.

    >>> import jax.numpy as jnp
    >>> from attnorm.output_norms import head_rms
    >>> [round(float(x), 3) for x in head_rms(jnp.array([[3.0, -3.0], [0.0, 0.5]])).ravel()]
    [1.0, -1.0, 0.0, 1.414]
    """
    x = _wide(output, eps)
    return _gained(x * jax.lax.rsqrt(_mean(x * x, -1) + eps), gain).astype(output.dtype)


def head_layer(
    output: Float[Array, "*batch N H"],
    *,
    gain: Float[Array, "#N #H"] | None = None,
    bias: Float[Array, "#N #H"] | None = None,
    eps: float = 1e-5,
) -> Float[Array, "*batch N H"]:
    """LayerNorm of each head's output, over its own head dims: ``(out - mean) / sqrt(var + ε)``.

    Arguments and errors as in :func:`head_rms`; ``bias`` is added last.

    >>> import jax.numpy as jnp
    >>> from attnorm.output_norms import head_layer
    >>> print(jnp.round(head_layer(jnp.array([[1.0, 3.0]])), 3))
    [[-1.  1.]]
    """
    return _gained(_standardized(_wide(output, eps), -1, eps), gain, bias).astype(output.dtype)


def global_layer(
    output: Float[Array, "*batch N H"],
    *,
    gain: Float[Array, "#N #H"] | None = None,
    bias: Float[Array, "#N #H"] | None = None,
    eps: float = 1e-5,
) -> Float[Array, "*batch N H"]:
    """LayerNorm over all heads of a query together. Arguments and errors as in :func:`head_layer`.

    The ratios between heads stay, unlike with :func:`head_layer`.

    >>> import jax.numpy as jnp
    >>> from attnorm.output_norms import global_layer
    >>> print(jnp.round(global_layer(jnp.array([[1.0, 1.0], [3.0, 3.0]])), 3))
    [[-1. -1.]
     [ 1.  1.]]
    """
    return _gained(_standardized(_wide(output, eps), (-2, -1), eps), gain, bias).astype(output.dtype)


def rescale_sqrt_position(output: Float[Array, "*batch N H"], count: Array) -> Float[Array, "*batch N H"]:
    """``out sqrt(n)``, n the number of keys that the query may see: what L2 does to softmax where all weights are equal.

    Args:
      output: floating point.
      count: broadcasts to the output, for causal attention ``1 + arange(T)`` of shape (T, 1, 1); 0 counts as 1.

    Raises:
      TypeError: an output that is not floating point.
      ValueError: a count that does not broadcast to the output.

    >>> import jax.numpy as jnp
    >>> from attnorm.output_norms import rescale_sqrt_position
    >>> print(rescale_sqrt_position(jnp.ones((2, 1, 1)), jnp.array([1, 4])[:, None, None]).ravel())
    [1. 2.]
    """
    return (_wide(output) * jnp.sqrt(_counts(output, count))).astype(output.dtype)


def unit_scale(output: Float[Array, "*batch N H"], count: Array) -> Float[Array, "*batch N H"]:
    """``out sqrt(n / e)``: variance 1 at the start of training, for logits of variance 1.

    Arguments and errors as in :func:`rescale_sqrt_position`. Softmax of n independent normal logits of variance 1 has
    Σ y² near e / n, and uncorrelated values of variance 1 then an output of that variance.

    >>> import jax, jax.numpy as jnp
    >>> from attnorm.output_norms import unit_scale
    >>> logits, values = jax.random.normal(jax.random.key(0), (2, 2000, 1000))
    >>> out = jnp.sum(jax.nn.softmax(logits) * values, axis=-1)[:, None, None]
    >>> print(round(float(jnp.var(unit_scale(out, 1000))), 1))
    1.0
    """
    return (_wide(output) * jnp.sqrt(_counts(output, count) / jnp.e)).astype(output.dtype)


def gated(
    output: Float[Array, "*batch N H"], gate: Float[Array, "*#batch #N #H"]
) -> Float[Array, "*batch N H"]:
    """``out σ(gate)``, with the gate a linear map of the query's token: one number for each head dim, or each head.

    Args:
      output: floating point.
      gate: broadcasts to the output.

    Raises:
      TypeError: an output or a gate that is not floating point.
      ValueError: a gate that does not broadcast to the output.

    Source: arXiv 2505.06708.

    >>> import jax.numpy as jnp
    >>> from attnorm.output_norms import gated
    >>> print(gated(jnp.array([[2.0, 4.0]]), jnp.zeros((1, 1))))
    [[1. 2.]]
    """
    gate = checked_floating("gate", gate)
    _check_broadcast("gate", gate, output)
    x = _wide(output)
    return (x * jax.nn.sigmoid(gate.astype(x.dtype))).astype(output.dtype)


def polar(
    output: Float[Array, "*batch N H"],
    effective_count: Float[Array, "*#batch #N"],
    *,
    beta: float | Array = 1.0,
    eps: float = 1e-5,
) -> Float[Array, "*batch N H"]:
    """``direction · tanh(β log(1 + N_eff))``: the output's direction, with a length that knows how many keys were read.

    The direction is :func:`head_rms`. With N_eff dropped this is AVnorm; L2 multiplies softmax's output by
    sqrt(N_eff); this is between.

    Args:
      output: floating point.
      effective_count: N_eff = 1 / Σ_j y_j² of softmax's weights, for each query and head.
      beta: a number, or an array that broadcasts to ``effective_count``.
      eps: as in :func:`head_rms`.

    Raises:
      TypeError: an output that is not floating point.
      ValueError: eps that is not positive, or counts that do not broadcast.

    Source: arXiv 2606.25156 and github.com/kreasof-ai/atma, whose direction has norm 1 instead of root mean square 1,
    whose β is the softplus of one number per head, and whose N_eff is multiplied by what a learned null key leaves of
    the weights.

    >>> import jax.numpy as jnp
    >>> from attnorm.output_norms import polar
    >>> [round(float(x), 3) for x in polar(jnp.array([[1.0, -1.0]]), jnp.array([1.0])).ravel()]
    [0.6, -0.6]
    """
    x = _wide(output, eps)
    length = jnp.tanh(beta * jnp.log1p(jnp.asarray(effective_count).astype(x.dtype)))
    _check_broadcast("effective_count", length[..., None], output)
    return (x * jax.lax.rsqrt(_mean(x * x, -1) + eps) * length[..., None]).astype(output.dtype)


def _wide(output: Float[Array, "... N Hv"], eps: float = 1.0) -> Float[Array, "... N Hv"]:
    output = checked_floating("output", output)
    if output.ndim < 2:
        raise ValueError(f"output must have shape (..., N, Hv), got {output.shape}")
    if not isinstance(eps, numbers.Real) or not eps > 0:
        raise ValueError(f"eps must be positive, got {eps!r}")
    return output.astype(jnp.promote_types(output.dtype, jnp.float32))


def _counts(output, count):
    count = jnp.asarray(count)
    _check_broadcast("count", count, output)
    return jnp.maximum(count, 1).astype(jnp.promote_types(output.dtype, jnp.float32))


def _check_broadcast(name, x, output):
    pairs = zip(reversed(x.shape), reversed(output.shape), strict=False)
    if x.ndim > output.ndim or any(size not in (1, full) for size, full in pairs):
        raise ValueError(f"{name} must broadcast to output {output.shape}, got shape {x.shape}")


def _mean(x, axis):
    return jnp.mean(x, axis=axis, keepdims=True)


def _standardized(x, axis, eps):
    centred = x - _mean(x, axis)
    return centred * jax.lax.rsqrt(_mean(centred * centred, axis) + eps)


def _gained(x, gain, bias=None):
    for name, factor in (("gain", gain), ("bias", bias)):
        if factor is not None:
            _check_broadcast(name, jnp.asarray(factor), x)
    if gain is not None:
        x = x * jnp.asarray(gain)
    return x if bias is None else x + jnp.asarray(bias)
