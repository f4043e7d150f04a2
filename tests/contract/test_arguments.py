"""Bad arguments: the error names the argument, what it got and what it wanted."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm.arguments import Options, WeightsOptions
from attnorm.normalizers.pointwise import Pointwise
from tests.contract.helpers import make_arrays

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


# Changed arguments, the error, and what its message holds: the argument's name first, then got and wanted.
REFUSED = {
    "query of rank 2": ({"query": zeros(T, H)}, ValueError, ["query", f"({T}, {H})", "(B, T, N, H)"]),
    "query of rank 5": ({"query": zeros(1, B, T, N, H)}, ValueError, ["query", "(1, 2, 5, 4, 8)"]),
    "integer query": (
        {"query": zeros(B, T, N, H, dtype=np.int32)},
        TypeError,
        ["query", "int32", "floating"],
    ),
    "key of another rank": ({"key": zeros(S, K, H)}, ValueError, ["key", "(7, 2, 8)", "4"]),
    "key of another batch": ({"key": zeros(3, S, K, H)}, ValueError, ["key", "(3, 7, 2, 8)", "batch", "2"]),
    "key of another head dim": ({"key": zeros(B, S, K, 9)}, ValueError, ["key", "(2, 7, 2, 9)", "8"]),
    "key of another dtype": (
        {"key": zeros(B, S, K, H, dtype=np.float16)},
        TypeError,
        ["key", "float16", "float32"],
    ),
    "value of another dtype": (
        {"value": jnp.zeros((B, S, K, H), jnp.bfloat16)},
        TypeError,
        ["value", "bfloat16", "float32"],
    ),
    "value of another length": (
        {"value": zeros(B, 6, K, H)},
        ValueError,
        ["key and value", "value of shape (2, 6, 2, 8)", "key of shape (2, 7, 2, 8)"],
    ),
    "value of other heads": (
        {"value": zeros(B, S, 4, H)},
        ValueError,
        ["key and value", "value of shape (2, 7, 4, 8)", "key of shape (2, 7, 2, 8)"],
    ),
    "value of another batch": ({"value": zeros(1, S, K, H)}, ValueError, ["value", "(1, 7, 2, 8)", "2"]),
    "heads that do not divide": (
        {"key": zeros(B, S, 3, H), "value": zeros(B, S, 3, H)},
        ValueError,
        ["heads", "4", "3", "multiple"],
    ),
    "layout of heads before length": (
        {"query": zeros(B, 4, 128, H), "key": zeros(B, 4, 96, H), "value": zeros(B, 4, 96, H)},
        ValueError,
        ["heads", "128", "96", "(B, T, N, H)", "(B, N, T, H)"],
    ),
    "bias that does not broadcast": (
        {"bias": zeros(K, T, S)},
        ValueError,
        ["bias", "(2, 5, 7)", "(2, 4, 5, 7)"],
    ),
    "bias of rank 5": ({"bias": zeros(1, 1, 1, T, S)}, ValueError, ["bias", "(1, 1, 1, 5, 7)"]),
    "bool bias": ({"bias": zeros(T, S, dtype=bool)}, TypeError, ["bias", "bool", "floating"]),
    "mask that does not broadcast": (
        {"mask": zeros(B, 1, S, T, dtype=bool)},
        ValueError,
        ["mask", "(2, 1, 7, 5)", "(2, 4, 5, 7)"],
    ),
    "mask of key heads": (
        {"mask": zeros(K, T, S, dtype=bool)},
        ValueError,
        ["mask", "(2, 5, 7)", "(2, 4, 5, 7)"],
    ),
    "float mask": ({"mask": zeros(T, S)}, TypeError, ["mask", "float32", "bool"]),
    "integer mask": ({"mask": zeros(T, S, dtype=np.int32)}, TypeError, ["mask", "int32", "bool"]),
    "unknown normalizer": (
        {"normalizer": "l3"},
        ValueError,
        ["normalizer", "'l3'", *attnorm.normalizer_names()],
    ),
    "normalizer of another type": ({"normalizer": 2.0}, TypeError, ["normalizer", "2.0"]),
    "function as normalizer": ({"normalizer": attnorm.softmax}, TypeError, ["normalizer", "function"]),
    "normalizer with key heads": (
        {"normalizer": attnorm.get_normalizer("sink", b=jnp.zeros(K))},
        ValueError,
        ["normalizer", "(2,)", "4"],
    ),
    "scale of NaN": ({"scale": math.nan}, ValueError, ["scale", "nan"]),
    "scale of another type": ({"scale": "1"}, TypeError, ["scale", "'1'"]),
    "is_causal of another type": ({"is_causal": 1}, TypeError, ["is_causal", "1", "bool"]),
    "offset of another shape": (
        {"query_offset": np.zeros(3, np.int32)},
        ValueError,
        ["query_offset", "(3,)", "2"],
    ),
    "offset of another dtype": ({"query_offset": 1.5}, TypeError, ["query_offset", "float64", "integer"]),
    "negative window": ({"local_window_size": (3, -1)}, ValueError, ["local_window_size", "(3, -1)"]),
    "window of three": ({"local_window_size": (1, 2, 3)}, TypeError, ["local_window_size", "(1, 2, 3)"]),
    "window of floats": ({"local_window_size": 1.5}, TypeError, ["local_window_size", "1.5"]),
    "window of float sides": ({"local_window_size": (1.5, 1)}, TypeError, ["local_window_size", "(1.5, 1)"]),
    "soft cap of 0": ({"logits_soft_cap": 0.0}, ValueError, ["logits_soft_cap", "0.0", "positive"]),
    "soft cap of infinity": ({"logits_soft_cap": math.inf}, ValueError, ["logits_soft_cap", "inf"]),
    "query lengths of another shape": (
        {"query_seq_lengths": np.zeros((B, T), np.int32)},
        ValueError,
        ["query_seq_lengths", "(2, 5)", "(2,)"],
    ),
    "key lengths of another shape": (
        {"key_value_seq_lengths": np.zeros(3, np.int32)},
        ValueError,
        ["key_value_seq_lengths", "(3,)", "(2,)"],
    ),
    "key lengths of another dtype": (
        {"key_value_seq_lengths": zeros(B)},
        TypeError,
        ["key_value_seq_lengths", "float32", "integer"],
    ),
    "key segments alone": (
        {"key_value_segment_ids": zeros(B, S, dtype=np.int32)},
        ValueError,
        ["query_segment_ids", "key_value_segment_ids"],
    ),
    "query segments alone": (
        {"query_segment_ids": zeros(B, T, dtype=np.int32)},
        ValueError,
        ["query_segment_ids", "key_value_segment_ids", "5", "7"],
    ),
    "segments of another shape": (
        {
            "query_segment_ids": zeros(B, S, dtype=np.int32),
            "key_value_segment_ids": zeros(B, S, dtype=np.int32),
        },
        ValueError,
        ["query_segment_ids", "(2, 7)", "(2, 5)"],
    ),
    "segments of another dtype": (
        {"query_segment_ids": zeros(B, T), "key_value_segment_ids": zeros(B, S, dtype=np.int32)},
        TypeError,
        ["query_segment_ids", "float32", "integer"],
    ),
    "dropout of 1": ({"dropout_rate": 1.0}, ValueError, ["dropout_rate", "1.0", "[0, 1)"]),
    "negative dropout": ({"dropout_rate": -0.1}, ValueError, ["dropout_rate", "-0.1", "[0, 1)"]),
    "dropout of NaN": ({"dropout_rate": math.nan}, ValueError, ["dropout_rate", "nan"]),
    "dropout without a key": ({"dropout_rate": 0.1}, ValueError, ["dropout_rng", "0.1", "None"]),
    "unknown implementation": (
        {"implementation": "flash"},
        ValueError,
        ["implementation", "'flash'", "reference", "chunked"],
    ),
    "implementation of jax.nn": (
        {"implementation": "xla"},
        ValueError,
        ["implementation", "'xla'", "jax.nn", "reference", "chunked"],
    ),
    "cudnn": ({"implementation": "cudnn"}, ValueError, ["implementation", "'cudnn'", "jax.nn"]),
    "no implementation": ({"implementation": ()}, (TypeError, ValueError), ["implementation", "()"]),
    "implementation of another type": ({"implementation": 3}, TypeError, ["implementation", "3"]),
    "residual": ({"return_residual": True}, (ValueError, TypeError), ["return_residual", "return_log_norm"]),
}


@pytest.mark.parametrize("traced", [False, True], ids=["called", "traced"])
@pytest.mark.parametrize("row", REFUSED)
def test_refused(row, traced):
    changed, error, fragments = REFUSED[row]
    query, key, value = make_arrays(B, T, S, N, K, H)
    arguments = {"query": query, "key": key, "value": value} | changed
    with pytest.raises(error) as caught:
        if traced:
            arrays = {k: x for k, x in arguments.items() if isinstance(x, np.ndarray | jax.Array)}
            static = {k: x for k, x in arguments.items() if k not in arrays}
            jax.eval_shape(lambda arrays: attnorm.dot_product_attention(**arrays, **static), arrays)
        else:
            attnorm.dot_product_attention(**arguments)
    message = str(caught.value)
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{message!r} does not say {missing}"


def test_bad_arguments_are_refused_before_anything_runs():
    """Also where the result would be empty."""
    query, key, value = make_arrays(0, T, S, N, K, H)
    with pytest.raises(ValueError, match="local_window_size"):
        attnorm.dot_product_attention(query, key, value, local_window_size=-1)


@pytest.mark.parametrize(
    "name, params, error, fragments",
    [
        ("lp", {"p": 0.0}, ValueError, ["p ", "positive", "0.0"]),
        ("lp", {"p": -1.0}, ValueError, ["p ", "positive", "-1.0"]),
        ("lp", {"p": math.nan}, ValueError, ["p ", "positive", "nan"]),
        ("lp", {"p": jnp.array([1.0, 0.0])}, ValueError, ["p ", "positive"]),
        ("lp", {"p": jnp.array([1.0, math.inf])}, ValueError, ["p ", "finite", "inf"]),
        ("lp", {"p": "2"}, TypeError, ["p ", "'2'", "number"]),
        ("lp", {"p": True}, TypeError, ["p ", "True", "number"]),
        ("lp", {"p": jnp.array([1, 2])}, TypeError, ["p ", "int32", "floating"]),
        ("lp", {"q": 2.0}, TypeError, ["lp", "'q'", "'p'"]),
        ("l2", {"p": 2.0}, TypeError, ["l2", "'p'"]),
        ("sink", {"b": math.nan}, ValueError, ["b ", "nan"]),
        ("sink", {"b": math.inf}, ValueError, ["b ", "inf"]),
        ("sink", {"b": jnp.array(math.nan)}, ValueError, ["b ", "nan"]),
        ("softmax_plus_n", {"n": -1.0}, ValueError, ["n ", "-1.0"]),
        ("softmax_plus_n", {"n": math.nan}, ValueError, ["n ", "nan"]),
        ("softmax_plus_n", {"n": jnp.array(0.0)}, ValueError, ["n ", "positive"]),
        ("sofmax", {}, ValueError, ["'sofmax' (did you mean 'softmax'?)", *attnorm.normalizer_names()]),
        (None, {}, TypeError, ["normalizer", "None"]),
    ],
)
def test_normalizers_refuse(name, params, error, fragments):
    with pytest.raises(error) as caught:
        attnorm.get_normalizer(name, **params)
    message = str(caught.value)
    missing = [fragment for fragment in fragments if fragment not in message]
    assert not missing, f"{message!r} does not say {missing}"


def test_a_normalizer_without_log_norm_says_so():
    @dataclass(frozen=True)
    class Sigmoid(attnorm.Normalizer):
        """Weights that no norm divides."""

        def terms(self, s, m):
            return jax.nn.sigmoid(s), ()

        def finalize(self, stats, m):
            return jnp.ones_like(m)

    query, key, value = make_arrays(B, T, S, N, K, H)
    with pytest.raises(ValueError, match=r"return_log_norm.*Sigmoid.*no log-norm"):
        attnorm.dot_product_attention(query, key, value, normalizer=Sigmoid(), return_log_norm=True)


@dataclass(frozen=True)
class Whole(attnorm.Normalizer):
    """Softmax; the rules below lack a part of it each."""

    def terms(self, s, m):
        f = jnp.exp(s - m)
        return f, (f,)

    def finalize(self, stats, m):
        return 1 / stats[0]


@dataclass(frozen=True)
class WithoutTerms(attnorm.Normalizer):
    finalize = Whole.finalize


@dataclass(frozen=True)
class WithoutFinalize(attnorm.Normalizer):
    terms = Whole.terms


@dataclass(frozen=True)
class WithoutMap(Whole):
    needs = frozenset({"map"})


@dataclass(frozen=True)
class WithoutRowWeights(Whole):
    needs = frozenset({"rows"})


@dataclass(frozen=True)
class WithoutWeight(Pointwise):
    pass


@dataclass(frozen=True)
class WithoutTuple(Whole):
    def terms(self, s, m):
        f = jnp.exp(s - m)
        return f, f


@dataclass(frozen=True)
class NeedsWord(Whole):
    needs = "map"


@dataclass(frozen=True)
class NeedsLetters(Whole):
    needs = frozenset("map")


@dataclass(frozen=True)
class WithText(Whole):
    F: str = "x"


@dataclass(frozen=True)
class WithSwitch(Whole):
    is_on: bool = True


@dataclass(frozen=True)
class WithFunction(Whole):
    F: Callable = jnp.exp


class Undecorated(attnorm.Normalizer):
    terms, finalize = Whole.terms, Whole.finalize


@dataclass
class NotFrozen(attnorm.Normalizer):
    terms, finalize = Whole.terms, Whole.finalize


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (WithoutTerms, r"WithoutTerms must define terms\(s, m\), the numerator and a tuple of statistics"),
        (WithoutFinalize, r"WithoutFinalize must define finalize\(stats, m\)"),
        (WithoutMap, r'WithoutMap must define map_logits\(s, place\), for it needs "map"'),
        (WithoutRowWeights, r'WithoutRowWeights must define row_weights\(.*\), for it needs "rows"'),
        (WithoutWeight, r"WithoutWeight must define weight\(s\)"),
        (WithoutTuple, "terms of WithoutTuple must give a numerator and a tuple of statistics, got"),
        (NeedsWord, "needs of NeedsWord must be a frozenset of words of .*'map'.*, got 'map'"),
        (NeedsLetters, r"needs of NeedsLetters must be .*, got frozenset\(.*'p'"),
        (WithText, "F of WithText must be a number or an array, or else a static_field, got 'x'"),
        (WithSwitch, "is_on of WithSwitch must be .* a static_field, got True"),
        (WithFunction, "F of WithFunction must be .* a static_field, got <"),
        (Undecorated, r"Undecorated must be decorated: @dataclass\(frozen=True\)"),
        (NotFrozen, r"NotFrozen must be frozen: @dataclass\(frozen=True\)"),
    ],
)
def test_a_rule_that_is_not_complete_says_what_it_lacks(rule, message):
    """In attention in O(T) memory, where it would be traced, and as dense weights."""
    query, key, value = make_arrays(B, T, S, N, K, H)
    for call in (
        lambda: attnorm.dot_product_attention(query, key, value, normalizer=rule(), implementation="chunked"),
        lambda: rule().weights(jnp.zeros(3)),
    ):
        with pytest.raises((TypeError, NotImplementedError), match=message):
            call()


@pytest.mark.parametrize(
    "options",
    [
        {"implementation": ("chunked", "reference")},
        {"implementation": None},
        {"scale": np.float32(0.3), "logits_soft_cap": 5},
        {"local_window_size": [3, None]},
        {"is_causal": np.bool_(True), "query_offset": np.int64(3)},
        {"query_offset": np.array([1, 2])},
        {"bias": jnp.zeros((T, S), jnp.bfloat16)},
        {"dropout_rate": 0, "dropout_rng": None},
        {"mask": np.ones(S, bool)},
        {"local_window_size": 10**12},
    ],
    ids=str,
)
def test_accepted(options):
    query, key, value = make_arrays(B, T, S, N, K, H)
    output = attnorm.dot_product_attention(query, key, value, **options)
    assert np.isfinite(output).all() and np.abs(output).max() > 0.1


@pytest.mark.parametrize(
    ("function", "options", "others"),
    [
        (attnorm.dot_product_attention, Options, {"return_log_norm"}),
        (attnorm.attention_weights, WeightsOptions, set()),
    ],
)
def test_typed_options_are_the_keyword_arguments(function, options, others):
    """Else type checkers would refuse what the function accepts, or the other way round."""
    keywords = {
        name: parameter.annotation
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and name not in others
    }
    assert keywords == {name: hint.__forward_arg__ for name, hint in options.__annotations__.items()}
