"""The one-pass rule: what a normaliser says about one logit, and the dense weights that follow from it.

A normaliser is three scalar functions of a logit ``s`` and a reference ``m`` (the row's running maximum):

    numerator     f(s, m)
    statistics    h_k(s, m),  summed over the visible keys of a row
    finaliser     g(Σ h, m)

and the weights are ``g · f``. The dense weights below, the O(T)-memory attention and the fused kernels
are all derived from these three, gradients included.

Nothing more is asked where every term is ``exp(c (s - m))``, or where none depends on m (``uses_max = False``). A rule
with any other terms says in ``rescale`` what carries them from one m to a larger one, as softpick.py does. Or its
weight is exp of a mapped logit, ``needs = frozenset({"map"})``, as in length.py: that keeps the digits of very negative
logits, where such a term as 1 + tanh(s) is 0 in float32, but no fused kernel serves it.

A rule may ask for more, and says so in ``needs``: a map of the logits that knows where they stand, or the whole row
at once. Every implementation says which of these it serves.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from attnorm.normalizers.learned import Learned

# What a rule may need, see Normalizer.needs.
_NEEDS = frozenset({"map", "position", "count", "distance", "rows", "numerators", "erf", "level"})


def is_array(value: Any) -> bool:
    """Whether a parameter is a pytree leaf (an array) rather than a static Python number."""
    return isinstance(value, (jax.Array, np.ndarray))


def checked_parameter(
    name: str, value: float | Array, wanted: str, accept: Callable[[Any], Any]
) -> float | Array:
    """The parameter as a Python float or a floating point array; values known now must satisfy ``accept``."""
    if isinstance(value, jax.Array | np.ndarray):
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"{name} must be a number or a floating point array, got dtype {value.dtype}")
        if not isinstance(value, jax.core.Tracer) and not np.all(accept(np.asarray(value, np.float64))):
            raise ValueError(f"{name} must be {wanted} and finite everywhere, got {value}")
        return value
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number or an array, got {value!r}")
    if not accept(value):
        raise ValueError(f"{name} must be {wanted}, got {value!r}")
    return float(value)


def checked_floating(name: str, x: Array) -> Array:
    """The array, in a dtype that attention computes with."""
    if x is None or isinstance(x, str):
        raise TypeError(f"{name} must be an array, got {x!r}")
    x = jnp.asarray(x)
    if x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64):
        raise TypeError(f"{name} must be floating point (float64, 32 or 16, or bfloat16), got {x.dtype}")
    return x


def checked_where(where: Array, shape: tuple[int, ...]) -> Array:
    """The boolean array, if it broadcasts to logits of this shape."""
    where = jnp.asarray(where)
    if where.dtype != jnp.bool_:
        raise TypeError(f"where must be boolean, got {where.dtype}")
    if not broadcasts_to(where.shape, shape):
        raise ValueError(f"where must broadcast to logits {shape}, got {where.shape}")
    return where


def broadcasts_to(shape: tuple[int, ...], full: tuple[int, ...]) -> bool:
    """Whether an array of one shape broadcasts to another, without making it larger."""
    return len(shape) <= len(full) and all(
        size in (1, n) for size, n in zip(reversed(shape), reversed(full), strict=False)
    )


def _is_same(a, b) -> bool:
    """Whether two leaves are one object, or known arrays of equal values."""
    if a is b:
        return True
    if any(isinstance(x, jax.core.Tracer) or not is_array(x) for x in (a, b)):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and bool(np.all(np.asarray(a) == np.asarray(b)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Place:
    """Where logits stand; a rule gets what it needs, as floating point numbers that broadcast to the logits.

    position: of the query, counted as the keys are: i + query_offset.
    count: n, the number of keys that the query may see and whose logit is not -inf; at least 1. So it is for every rule,
      and such a key is as if removed, whether a rule asks for n here or sums it. In attention, where no rule knows all
      logits beforehand, a logit counts as -inf where its bias is, and no soft cap makes it finite again. The value of
      such a key may still be read there: only a mask keeps a NaN or inf in it from the output.
    distance: from the key to the query, position - j.
    """

    position: Array | None = None
    count: Array | None = None
    distance: Array | None = None


def undefined(rule: Normalizer, function: str) -> NotImplementedError:
    """The error of a function that the rule's class must define."""
    return NotImplementedError(f"{type(rule).__name__} must define {function}")


def static_field(default: Any) -> Any:
    """A field of a rule that is no number and never traced, such as the name of a function."""
    return dataclasses.field(default=default, metadata={"static": True})


class Normalizer:
    """Base class of the rules: a frozen dataclass that is also a pytree.

    A parameter given as a Python float is static: part of the tree structure, compared by value, so equal
    instances share one compilation; :func:`checked_parameter`, in ``__post_init__``, makes floats of whole numbers. A parameter given as an array is a leaf: it can be traced, mapped,
    differentiated and given per head.

    Every function is elementwise over its arguments, which broadcast against each other. ``m`` is constant
    under differentiation, because no output depends on it.
    """

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        # The decorator leaves what a class has: its own functions would compare arrays as if they were numbers.
        for name in ("__eq__", "__hash__"):
            setattr(cls, name, getattr(cls, name))
        jax.tree_util.register_pytree_with_keys(cls, cls._flatten, cls._unflatten)

    # The rule.

    # The properties are class attributes of most rules.

    @property
    def needs_equal_logits(self) -> bool:
        """Whether a backward pass must round its logits as the forward pass did.

        So it is where terms jump at s = m, or where they magnify differences of logits.
        """
        return False

    @property
    def needs(self) -> frozenset[str]:
        """What the rule needs beside its three functions.

        "map": ``map_logits`` is applied first, before the maximum.
        "position", "count", "distance": parts of :class:`Place` that the map is given.
        "rows": all logits of a row at once: ``row_weights`` replaces the three functions.
        "numerators": several numerators: ``terms`` gives a tuple of them and ``finalize`` as many factors, and the
          weights are the sum of their products; or a reference m of its own.
        "erf": the error function in its terms, which compilers for kernels may lack.
        "level": several passes over the keys, to solve for a level of each row (normalizers/tsallis.py).
        """
        return frozenset()

    @property
    def passes(self) -> int:
        """How often a row's logits are read before all its weights are known, but for the pass that uses them."""
        return 1

    # Whether terms depend on m; where they do not, no maximum is taken and nothing is rescaled.
    uses_max: ClassVar[bool] = True
    # Which parameters can be learned, and how.
    learned: ClassVar[Mapping[str, Learned]] = {}

    def map_logits(self, s: Array, place: Place) -> Array:
        """The logits that the terms are given, from finite ones and from where they stand."""
        raise undefined(self, 'map_logits(s, place), for it needs "map"')

    def terms(self, s: Array, m: Array) -> tuple[Array, tuple[Array, ...]]:
        """Numerator and statistics of one logit: ``f, (h_0, ...)``.

        All vanish at ``s = -inf`` (see :func:`of_weighted`); a row of zero statistics has no gradient.
        """
        raise undefined(self, "terms(s, m), the numerator and a tuple of statistics")

    def row_weights(self, s: Array, visible: Array, place: Place, axis: int) -> Array:
        """For a rule that needs "rows": the weights of finite logits; what stands at hidden keys is dropped."""
        raise undefined(self, 'row_weights(s, visible, place, axis), for it needs "rows"')

    def finalize(self, stats: tuple[Array, ...], m: Array) -> Array:
        """The row factor g, from the summed statistics. 0, with zero gradients, for an empty row."""
        raise undefined(self, "finalize(stats, m), the row factor")

    def log_norm(self, stats: tuple[Array, ...], m: Array) -> Array | None:
        """The log-norm λ with ``weights = exp(s - λ)``, or None where the weights have no such form."""
        return None

    def start(self, floor: float) -> Array | float:
        """The reference m of a row before its first key: a finite floor, so that no inf - inf can arise."""
        return floor

    def next_reference(self, m: Array, s: Array, axis: int = -1) -> Array:
        """The reference after more logits of a row: the larger one of m and their maximum."""
        if not self.uses_max:
            return m
        initial = None if s.shape[axis] else -jnp.inf
        return jnp.maximum(m, jnp.max(s, axis=axis, keepdims=True, initial=initial))

    def merged_reference(self, m: Array, other: Array) -> Array:
        """The reference of two parts of a row."""
        return jnp.maximum(m, other)

    def rescale(self, m_old: Array, m_new: Array) -> tuple[Array, tuple[Array, ...]]:
        """Factors that carry the numerator and the statistics from one reference to a larger one.

        As it stands for terms exp(c (s - m)): what a past row sum owes is then what a key of logit m_old would. Terms
        without m owe nothing.
        """
        if self.uses_max:
            return self.terms(m_old, m_new)
        one = jnp.ones_like(m_old)
        return one, (one,) * len(jax.eval_shape(self.terms, m_old, m_new)[1])

    def carry(
        self, sums: Array, stats: tuple[Array, ...], m_old: Array, m_new: Array
    ) -> tuple[Array, tuple[Array, ...]]:
        """``Σ f v`` and the statistics of a row, carried from one reference to another."""
        factor, factors = self.rescale(m_old, m_new)
        return sums * factor, tuple(h * r for h, r in zip(stats, factors, strict=True))

    # Dense weights.

    def weights(
        self,
        logits: Float[Array, "..."],
        *,
        axis: int = -1,
        where: Bool[Array, "..."] | None = None,
        position: Float[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        """The normalised weights along ``axis``; keys where ``where`` is False, or of logit -inf, are as if removed.

        Array parameters broadcast against the logits, and so do the queries' positions, for rules that need
        them; without these, every query stands at the last key. Computed in float32 (float64 for float64 logits)
        and returned in the dtype of the logits.

        Raises:
          TypeError: logits that are not floating point, or a ``where`` that is not boolean.
          ValueError: an axis out of range, or a ``where`` or ``position`` that does not broadcast to the logits.
        """
        checked_rule(self)
        logits = checked_floating("logits", logits)
        if isinstance(axis, bool) or not isinstance(axis, numbers.Integral):
            raise TypeError(f"axis must be an int, got {axis!r}")
        if not -logits.ndim <= axis < logits.ndim:
            raise ValueError(
                f"axis must be in [-{logits.ndim}, {logits.ndim}) for logits {logits.shape}, got {axis}"
            )
        if where is not None:
            where = checked_where(where, logits.shape)
        rows = list(logits.shape)
        rows[axis] = 1
        of_rows = [(key.name, leaf) for key, leaf in self._flatten()[0]]
        if position is not None:
            of_rows.append(("position", position))
        for name, leaf in of_rows:
            if not broadcasts_to(jnp.shape(leaf), rows):
                raise ValueError(
                    f"{name} must broadcast to logits {logits.shape}, with size 1 along axis {axis}, "
                    f"got shape {jnp.shape(leaf)}"
                )
        dtype = jnp.promote_types(logits.dtype, jnp.float32)
        rule = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), self)
        place = self._place_in_rows(logits, axis, where, position, dtype)
        weights, _ = evaluate(rule, logits.astype(dtype), where, place, axis)
        if where is not None:  # again, so that a NaN cotangent at a hidden key stops here
            weights = jnp.where(where, weights, 0)
        return weights.astype(logits.dtype)

    def _place_in_rows(self, logits, axis, where, position, dtype) -> Place:
        count = distance = None
        if "count" in self.needs:
            counted = logits != -jnp.inf if where is None else (logits != -jnp.inf) & where
            count = jnp.maximum(jnp.sum(counted, axis, keepdims=True).astype(dtype), 1)
        if self.needs & {"position", "distance"}:
            position = jnp.asarray(logits.shape[axis] - 1 if position is None else position, dtype)
        if "distance" in self.needs:
            distance = position - jax.lax.broadcasted_iota(dtype, logits.shape, axis % logits.ndim)
        return Place(position if "position" in self.needs else None, count, distance)

    # Equality by value, and the pytree.

    def __eq__(self, other):
        if type(self) is not type(other):
            return NotImplemented
        (leaves, static), (other_leaves, other_static) = self._flatten(), other._flatten()
        return static == other_static and all(
            _is_same(a, b) for (_, a), (_, b) in zip(leaves, other_leaves, strict=True)
        )

    def __hash__(self):
        leaves, static = self._flatten()
        return hash((type(self), static, *(leaf for _, leaf in leaves)))

    def _flatten(self):
        # Whatever is not a number is a leaf: JAX also unflattens with placeholders in place of arrays.
        if not dataclasses.is_dataclass(self):
            raise TypeError(f"{type(self).__name__} must be decorated: @dataclass(frozen=True)")
        leaves, static = [], []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) or field.metadata.get("static"):
                static.append((field.name, value))
            else:
                static.append((field.name, None))
                leaves.append((jax.tree_util.GetAttrKey(field.name), value))
        return leaves, tuple(static)

    @classmethod
    def _unflatten(cls, static, leaves):
        self = object.__new__(cls)
        leaves = iter(leaves)
        for name, value in static:
            object.__setattr__(self, name, next(leaves) if value is None else value)
        return self


def checked_rule(rule: Normalizer) -> Normalizer:
    """The rule, if its class is written as attention takes it."""
    name = type(rule).__name__
    leaves, _ = rule._flatten()
    if not rule.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{name} must be frozen: @dataclass(frozen=True)")
    needs = rule.needs
    if not isinstance(needs, frozenset | set) or needs - _NEEDS:
        raise TypeError(f"needs of {name} must be a frozenset of words of {sorted(_NEEDS)}, got {needs!r}")
    for key, field in leaves:
        for value in jax.tree.leaves(field):
            is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
            if not is_number and not hasattr(value, "dtype"):
                raise TypeError(
                    f"{key.name} of {name} must be a number or an array, or else a static_field, got {value!r}"
                )
    return rule


def checked_terms(rule: Normalizer, s: Array, m: Array) -> tuple[Array, tuple[Array, ...]]:
    """The rule's terms, if they are a numerator and a tuple of statistics."""
    terms = rule.terms(s, m)
    if not isinstance(terms, tuple) or len(terms) != 2 or not isinstance(terms[1], tuple):
        raise TypeError(
            f"terms of {type(rule).__name__} must give a numerator and a tuple of statistics, got {terms!r}"
        )
    return terms


def prepared(
    normalizer: Normalizer, s: Array, visible: Array | None, place: Place
) -> tuple[Array, Array | None]:
    """Logits as the rule's terms take them, and where they count (None: everywhere)."""
    needs = normalizer.needs
    if needs & {"map", "rows"}:
        weighted = s != -jnp.inf
        visible = weighted if visible is None else visible & weighted
        s = jnp.where(visible, s, 0)  # a finite number, so that no slope there is NaN
        if "map" in needs:
            s = normalizer.map_logits(s, place)
    if visible is not None:
        s = jnp.where(visible, s, 0 if "rows" in needs else -jnp.inf)
    return s, visible


def of_weighted(
    terms: Callable[[Array], tuple[Array, tuple[Array, ...]]], s: Array
) -> tuple[Array, tuple[Array, ...]]:
    """``terms(s)``, and 0 at ``s = -inf`` for terms that would not vanish there, or have no slope."""
    weighted = s != -jnp.inf
    return jax.tree.map(lambda x: jnp.where(weighted, x, 0), terms(jnp.where(weighted, s, 0)))


def evaluate(
    normalizer: Normalizer, s: Array, visible: Array | None, place: Place, axis: int = -1
) -> tuple[Array, Array | None]:
    """Weights and log-norm λ of dense logits; the row axis of λ is kept with size 1."""
    s, visible = prepared(normalizer, s, visible, place)
    if "rows" in normalizer.needs:
        assert visible is not None  # logits of -inf are hidden from such a rule
        return jnp.where(visible, normalizer.row_weights(s, visible, place, axis), 0), None
    start = jax.tree.map(lambda m: jnp.asarray(m, s.dtype), normalizer.start(float(jnp.finfo(s.dtype).min)))
    m = jax.lax.stop_gradient(normalizer.next_reference(start, s, axis))
    f, stats = checked_terms(normalizer, s, m)
    if visible is not None:
        f, stats = jax.tree.map(lambda x: jnp.where(visible, x, 0), (f, stats))
    stats = tuple(jnp.sum(h, axis=axis, keepdims=True) for h in stats)
    return combined(f, normalizer.finalize(stats, m)), normalizer.log_norm(stats, m)


def combined(numerators: Array | tuple[Array, ...], factors: Array | tuple[Array, ...]) -> Array:
    """The weights, or their sums: ``Σ_c g_c f_c``, mostly of one numerator."""
    products = jax.tree.map(jnp.multiply, numerators, factors)
    return functools.reduce(jnp.add, jax.tree.leaves(products))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """Attention over some of the keys: ``Σ f v``, the reference m, and the statistics of each row.

    ``accumulator`` has shape (..., Hv), one for each numerator; ``m`` and every statistic have shape (..., 1).
    """

    accumulator: Array
    m: Array
    stats: tuple[Array, ...]

    def finalize(self, normalizer: Normalizer) -> tuple[Array, Array | None]:
        """The attention output (..., Hv) and its log-norm (..., 1)."""
        factor = normalizer.finalize(self.stats, self.m)
        return combined(self.accumulator, factor), normalizer.log_norm(self.stats, self.m)


def nothing_seen(normalizer: Normalizer, rows: tuple[int, ...], width: int, dtype: Any) -> Partial:
    """The state of rows before their first key, (..., width) and (..., 1)."""
    start = normalizer.start(float(jnp.finfo(dtype).min))
    m = jax.tree.map(lambda x: jnp.broadcast_to(jnp.asarray(x, dtype), (*rows, 1)), start)
    f, stats = jax.eval_shape(functools.partial(checked_terms, normalizer), jnp.zeros((*rows, 1), dtype), m)
    sums = jax.tree.map(lambda _: jnp.zeros((*rows, width), dtype), f)
    return Partial(sums, m, tuple(jnp.zeros((*rows, 1), dtype) for _ in stats))


def merge(normalizer: Normalizer, a: Partial, b: Partial) -> Partial:
    """The partial result over the union of two disjoint key sets; exact and associative."""
    m = normalizer.merged_reference(a.m, b.m)
    carried = (normalizer.carry(part.accumulator, part.stats, part.m, m) for part in (a, b))
    accumulator, stats = jax.tree.map(jnp.add, *carried)
    return Partial(accumulator, m, stats)
