"""Multi-head attention that owns and learns the parameters of its normaliser, as an nnx and as a linen module."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jaxtyping import Array, Float

from attnorm.attention import dot_product_attention
from attnorm.normalizers import Normalizer, get_normalizer
from attnorm.normalizers.learned import Learned
from attnorm.normalizers.registry import learned_parameters


class NormalizedAttention(nnx.Module):
    """Multi-head attention with a normaliser whose parameters are learned, one for each head.

    Which parameters can be learned, where they start and how they are kept in their range, the normaliser says
    itself: p of ``"lp"``, b of ``"sink"``, h of ``"ssmax"``, alpha of ``"entmax"`` and so on.

    Args:
      num_heads: N.
      in_features: size of the last axis of the inputs.
      normalizer: a name (:func:`attnorm.normalizer_names`).
      parameters: values of the normaliser's parameters; those that are learned start there.
      learned: names of the parameters to learn; by default all that the normaliser can learn and that are its
        parameters.
      num_key_value_heads: K, by default N.
      head_dim: H, by default in_features / N.
      out_features: by default in_features.
      use_bias: whether the four projections have a bias.
      dtype: of the computation, by default that of the inputs and parameters together.
      param_dtype: of the parameters.
      dropout_rate: of the weights, where a call gives a ``dropout_rng``.
      implementation: as in :func:`attnorm.dot_product_attention`.
      rngs: with a "params" stream.

    Raises:
      ValueError: an unknown normaliser, a parameter out of range or that cannot be learned, a size below 1, in_features that
        num_heads does not divide, or heads that num_key_value_heads does not.
      TypeError: a parameter that the normaliser does not have, a size that is no whole number, names in another form, or
        other ``rngs``.

    >>> import jax, jax.numpy as jnp
    >>> from flax import nnx
    >>> from attnorm.modules import NormalizedAttention
    >>> layer = NormalizedAttention(4, 32, normalizer="entmax", rngs=nnx.Rngs(0))
    >>> x = jax.random.normal(jax.random.key(1), (2, 16, 32))
    >>> layer(x, is_causal=True).shape
    (2, 16, 32)
    >>> print(layer.normalizer().alpha)
    [1.5 1.5 1.5 1.5]
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        normalizer: str = "lp",
        parameters: Mapping[str, Any] | None = None,
        learned: Sequence[str] | None = None,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        out_features: int | None = None,
        use_bias: bool = True,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        dropout_rate: float = 0.0,
        implementation: str | tuple[str, ...] | None = None,
        rngs: nnx.Rngs,
    ):
        if not isinstance(rngs, nnx.Rngs) or not {"params", "default"} & set(rngs):
            got = list(rngs) if isinstance(rngs, nnx.Rngs) else repr(rngs)
            raise TypeError(f'rngs must be an nnx.Rngs with a "params" or "default" stream, got {got}')
        self.family = NormalizerFamily.of(normalizer, parameters, learned)
        self.dropout_rate = dropout_rate
        self.implementation = implementation
        heads, head_dim = _heads(
            num_heads, num_key_value_heads, in_features, head_dim, out_features, dropout_rate
        )

        def project(heads):
            return nnx.LinearGeneral(
                in_features,
                (heads, head_dim),
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                rngs=rngs,
            )

        self.query, self.key, self.value = project(num_heads), project(heads), project(heads)
        self.out = nnx.LinearGeneral(
            (num_heads, head_dim),
            out_features or in_features,
            axis=(-2, -1),
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            rngs=rngs,
        )
        self.of_normalizer = nnx.Dict(
            {
                name: nnx.Param(jnp.full(num_heads, parameter.start(), jnp.float32))
                for name, parameter in self.family.learned
            }
        )

    def normalizer(self) -> Normalizer:
        """The normaliser, with the current values of what is learned."""
        return self.family.normalizer({name: x[...] for name, x in self.of_normalizer.items()})

    def __call__(
        self,
        x: Float[Array, "B T D"] | Float[Array, "T D"],
        x_kv: Float[Array, "B S D"] | Float[Array, "S D"] | None = None,
        *,
        dropout_rng: Array | None = None,
        **options: Any,
    ) -> Float[Array, "B T D"] | Float[Array, "T D"]:
        """The attention of x to ``x_kv``, by default to itself; options of :func:`attnorm.dot_product_attention`."""
        (features,) = self.query.in_features
        x, x_kv = _inputs(x, x_kv, features, features)
        attended = dot_product_attention(
            self.query(x),
            self.key(x_kv),
            self.value(x_kv),
            normalizer=self.normalizer(),
            dropout_rate=0.0 if dropout_rng is None else self.dropout_rate,
            dropout_rng=dropout_rng,
            implementation=self.implementation,
            **options,
        )
        return self.out(attended)


class LinenNormalizedAttention(linen.Module):
    """:class:`NormalizedAttention` for linen; its arguments, with the features taken from the inputs.

    What is learned is an unbounded number, from which :class:`attnorm.normalizers.learned.Learned` makes the parameter.

    >>> import jax, jax.numpy as jnp
    >>> from attnorm.modules import LinenNormalizedAttention
    >>> x = jax.random.normal(jax.random.key(1), (2, 16, 32))
    >>> layer = LinenNormalizedAttention(num_heads=4, normalizer="sink")
    >>> variables = layer.init(jax.random.key(0), x)
    >>> layer.apply(variables, x, is_causal=True).shape
    (2, 16, 32)
    >>> print(variables["params"]["normalizer_b"])
    [0. 0. 0. 0.]
    >>> from attnorm.normalizers.registry import learned_parameters
    >>> print(learned_parameters("sink")["b"].value(variables["params"]["normalizer_b"]))
    [0. 0. 0. 0.]
    """

    num_heads: int
    normalizer: str = "lp"
    parameters: Mapping[str, Any] | None = None
    learned: Sequence[str] | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    out_features: int | None = None
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    dropout_rate: float = 0.0
    implementation: str | tuple[str, ...] | None = None

    @linen.compact
    def __call__(
        self,
        x: Float[Array, "B T D"] | Float[Array, "T D"],
        x_kv: Float[Array, "B S D"] | Float[Array, "S D"] | None = None,
        *,
        dropout_rng: Array | None = None,
        **options: Any,
    ) -> Float[Array, "B T D"] | Float[Array, "T D"]:
        """As of :class:`NormalizedAttention`."""
        family = NormalizerFamily.of(self.normalizer, self.parameters, self.learned)
        x, x_kv = _inputs(x, x_kv, self._features("query"), self._features("key"))
        heads, head_dim = _heads(
            self.num_heads,
            self.num_key_value_heads,
            x.shape[-1],
            self.head_dim,
            self.out_features,
            self.dropout_rate,
        )

        def project(name, features, axis=-1):
            return linen.DenseGeneral(
                features,
                axis=axis,
                use_bias=self.use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                name=name,
            )

        values = {
            name: self.param(
                f"normalizer_{name}",
                linen.initializers.constant(parameter.start()),
                (self.num_heads,),
                jnp.float32,
            )
            for name, parameter in family.learned
        }
        attended = dot_product_attention(
            project("query", (self.num_heads, head_dim))(x),
            project("key", (heads, head_dim))(x_kv),
            project("value", (heads, head_dim))(x_kv),
            normalizer=family.normalizer(values),
            dropout_rate=0.0 if dropout_rng is None else self.dropout_rate,
            dropout_rng=dropout_rng,
            implementation=self.implementation,
            **options,
        )
        return project("out", self.out_features or x.shape[-1], axis=(-2, -1))(attended)

    def _features(self, projection: str) -> int | None:
        """Those of the inputs that a projection was initialised with; None where it is not yet."""
        if not self.has_variable("params", projection):
            return None
        # A kernel may be in a box with the names of its axes.
        return linen.meta.unbox(self.get_variable("params", projection))["kernel"].shape[0]


@dataclasses.dataclass(frozen=True)
class NormalizerFamily:
    """A normaliser whose parameters are partly fixed and partly learned."""

    name: str
    fixed: tuple[tuple[str, Any], ...]
    learned: tuple[tuple[str, Learned], ...]

    @staticmethod
    def of(name, parameters, learned):
        if not isinstance(parameters or {}, Mapping):
            raise TypeError(f"parameters must be a mapping from names to values, got {parameters!r}")
        if isinstance(learned, str):
            raise TypeError(f"learned must be a sequence of names, got {learned!r}")
        parameters = dict(parameters or {})
        for parameter, value in parameters.items():
            if not isinstance(value, numbers.Real | str):
                raise TypeError(f"parameters must be numbers or words, got {parameter} = {value!r}")
        can_learn = learned_parameters(name, **parameters)
        chosen = list(can_learn) if learned is None else list(dict.fromkeys(learned))
        for parameter in chosen:
            if parameter not in can_learn:
                raise ValueError(
                    f"learned must be parameters that {name!r} can learn, {sorted(can_learn)}, got {parameter!r}"
                )
            if parameter in parameters:
                init = parameters.pop(parameter)
                try:
                    can_learn[parameter] = dataclasses.replace(can_learn[parameter], init=init)
                except ValueError as error:
                    raise ValueError(
                        f"parameters: {parameter}: {error}; without {parameter!r} in learned it stays there"
                    ) from error
        return NormalizerFamily(
            name, tuple(parameters.items()), tuple((parameter, can_learn[parameter]) for parameter in chosen)
        )

    def normalizer(self, unbounded: Mapping[str, jax.Array]) -> Normalizer:
        values = {name: parameter.value(unbounded[name]) for name, parameter in self.learned}
        return get_normalizer(self.name, **dict(self.fixed), **values)


def _inputs(
    x: Array, x_kv: Array | None, features: int | None, features_kv: int | None
) -> tuple[Array, Array]:
    """x and x_kv, by default x, if the projections take them; None features: of any number."""
    x_kv = x if x_kv is None else x_kv
    for name, inputs in {"x": x, "x_kv": x_kv}.items():
        if not hasattr(inputs, "shape"):
            raise TypeError(f"{name} must be an array, got {type(inputs).__name__}")
    if x.ndim not in (2, 3) or features not in (None, x.shape[-1]):
        D = "D" if features is None else features
        raise ValueError(f"x must have shape (B, T, {D}) or (T, {D}), got {x.shape}")
    same_rows = x_kv.ndim == x.ndim and x_kv.shape[:-2] == x.shape[:-2]
    if not same_rows or features_kv not in (None, x_kv.shape[-1]):
        wanted = (*x.shape[:-2], "S", "D" if features_kv is None else features_kv)
        raise ValueError(f"x_kv must have shape ({', '.join(map(str, wanted))}), got {x_kv.shape}")
    return x, x_kv


def _heads(
    num_heads: int,
    num_key_value_heads: int | None,
    in_features: int,
    head_dim: int | None,
    out_features: int | None,
    dropout_rate: float,
) -> tuple[int, int]:
    """K and H, of checked numbers."""
    sizes = {
        "num_heads": num_heads,
        "num_key_value_heads": num_key_value_heads,
        "in_features": in_features,
        "head_dim": head_dim,
        "out_features": out_features,
    }
    for name, size in sizes.items():
        if size is None and name not in ("num_heads", "in_features"):
            continue
        if isinstance(size, bool) or not isinstance(size, numbers.Integral):
            raise TypeError(f"{name} must be a whole number, got {size!r}")
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size!r}")
    if not isinstance(dropout_rate, numbers.Real) or not 0 <= dropout_rate < 1:
        raise ValueError(f"dropout_rate must be in [0, 1), got {dropout_rate!r}")
    heads = num_heads if num_key_value_heads is None else num_key_value_heads
    if num_heads % heads:
        raise ValueError(f"num_heads must be a multiple of num_key_value_heads, got {num_heads} and {heads}")
    if head_dim is None and in_features % num_heads:
        raise ValueError(f"in_features must be a multiple of num_heads, got {in_features} and {num_heads}")
    return heads, head_dim or in_features // num_heads
