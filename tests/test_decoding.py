"""Attention over windowed and split caches is attention over the keys in their order, for every normaliser."""

import functools
from dataclasses import dataclass

import numpy as np
import pytest

import attnorm
from attnorm import chunked, decoding, kernels
from attnorm.normalizers.rule import Normalizer
from tests.kernels.conftest import INTERPRET

B, N, K, H, L = 2, 4, 2, 8, 12
WINDOW = 4
T, OFFSETS = 2, np.array([5, 9], np.int32)  # queries at 5, 6 in one row, and at 9, 10 in the other
# Where the defaults would make so few keys a special case.
PARAMS = {
    "lp": {"p": np.array([0.7, 1.5, 3.0, 6.0], np.float32)},
    "sink": {"b": np.array([-1.0, 0.0, 1.0, 2.0], np.float32)},
    "llama4": {"floor_scale": 3.0, "attn_scale": 1.0},
    "log_n": {"n_train": 8.0},
    "top_k": {"k": 3},
}
NAMES = attnorm.normalizer_names()


def needs(name):
    return attnorm.get_normalizer(name).needs


def first_of_each_kind(names):
    """Of the names whose rules need the same, the first."""
    return list({needs(name): name for name in reversed(names)}.values())


SPLIT = [name for name in NAMES if not needs(name) - chunked.SERVES]
# Without rules that solve equations, which take long to compile, and with the one that asks for keys in their order.
WINDOWED = [*first_of_each_kind([name for name in NAMES if "level" not in needs(name)]), "stick_breaking"]


def rule(name):
    return attnorm.get_normalizer(name, **PARAMS.get(name, {}))


def random_arrays():
    rng = np.random.default_rng(0)
    shapes = (B, L, N, H), (B, L, K, H), (B, L, K, H)
    return tuple(rng.normal(size=shape).astype(np.float32) for shape in shapes)


QUERY, KEY, VALUE = random_arrays()
NEW = np.arange(B)[:, None], OFFSETS[:, None] + np.arange(T)
LATER = np.arange(L) >= OFFSETS[:, None] + T


def expected(name, **options):
    """The rows of the new queries, of attention over all keys in order."""
    out = attnorm.dot_product_attention(
        QUERY,
        KEY,
        VALUE,
        normalizer=rule(name),
        is_causal=True,
        implementation="reference",
        precision="highest",
        **options,
    )
    return np.asarray(out)[NEW]


def hide_later(x):
    return np.where(LATER[:, :, None, None], np.nan, x).astype(np.float32)


def assert_near(got, expected):
    np.testing.assert_allclose(got, expected, atol=1e-5 * np.max(np.abs(expected)), rtol=0)


@functools.cache
def windowed_cache():
    """Rows enter it until they are as long as they should be."""
    cache = attnorm.make_cache(
        num_layers=1, batch_size=B, num_slots=WINDOW + T, num_key_value_heads=K, head_dim=H, window=WINDOW
    )
    for start in range(0, OFFSETS.max() + T, T):
        counts = np.clip(OFFSETS + T - start, 0, T)
        new = slice(start, start + T)
        cache = cache.append(0, KEY[:, new], VALUE[:, new], counts).advance(counts)
    return cache


@pytest.mark.parametrize("name", WINDOWED)
def test_windowed_attention(name):
    cache = windowed_cache()
    out = attnorm.windowed_attention(
        QUERY[NEW],
        cache.key[0],
        cache.value[0],
        window=WINDOW,
        query_offset=OFFSETS,
        normalizer=rule(name),
        implementation="reference",
        precision="highest",
    )
    assert_near(out, expected(name, local_window_size=(WINDOW, 0)))


@pytest.mark.parametrize("name", first_of_each_kind(SPLIT))
def test_split_attention(name):
    check_split(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SPLIT) - set(first_of_each_kind(SPLIT))))
def test_split_attention_of_the_others(name):
    check_split(name)


def check_split(name):
    out = attnorm.split_attention(
        QUERY[NEW],
        hide_later(KEY),
        hide_later(VALUE),
        num_parts=3,
        query_offset=OFFSETS,
        normalizer=rule(name),
        precision="highest",
    )
    assert_near(out, expected(name))


@pytest.mark.slow
def test_split_without_batch():
    out = attnorm.split_attention(
        QUERY[0, 7:8], KEY[0], VALUE[0], num_parts=4, query_offset=7, logits_soft_cap=1.0, scale=0.5
    )
    whole = attnorm.dot_product_attention(
        QUERY[0], KEY[0], VALUE[0], is_causal=True, logits_soft_cap=1.0, scale=0.5, implementation="reference"
    )
    assert_near(out, whole[7:8])


@pytest.mark.slow
def test_split_attention_by_the_tpu_kernel(monkeypatch):
    monkeypatch.setattr(decoding.jax, "default_backend", lambda: "tpu")
    used = []
    partial_attend = decoding.tpu.partial_attend
    monkeypatch.setattr(
        decoding.tpu, "partial_attend", lambda *a, **k: used.append(1) or partial_attend(*a, **k)
    )
    with kernels.config(INTERPRET):
        out = attnorm.split_attention(
            QUERY[NEW],
            hide_later(KEY),
            hide_later(VALUE),
            num_parts=3,
            query_offset=OFFSETS,
            normalizer=rule("sink"),
            precision="highest",
        )
    assert used
    assert_near(out, expected("sink"))


# Bad input.


def test_normalizers_that_parts_do_not_serve():
    assert set(NAMES) - set(SPLIT) >= {"entmax15", "stick_breaking", "top_k"}
    with pytest.raises(NotImplementedError, match=r"normalizer TopK\(k=3\) needs rows, which parts"):
        attnorm.split_attention(QUERY, KEY, VALUE, num_parts=2, normalizer=rule("top_k"))


@pytest.mark.parametrize(
    "error, num_parts, message",
    [
        (ValueError, 5, r"num_parts must divide the number of keys S = 12, got 5"),
        (ValueError, 0, "num_parts must be at least 1, got 0"),
        (TypeError, 2.0, "num_parts must be an int, got 2.0"),
    ],
)
def test_parts_that_cannot_be(error, num_parts, message):
    with pytest.raises(error, match=message):
        attnorm.split_attention(QUERY, KEY, VALUE, num_parts=num_parts)


@pytest.mark.parametrize(
    "error, options, message",
    [
        (ValueError, {"window": 11}, r"window must be at most S - T = 12 - 2, got 11"),
        (ValueError, {"window": -1}, "window must be at least 0, got -1"),
        (TypeError, {"window": None}, "window must be an int, got None"),
        (
            ValueError,
            {"query_offset": np.zeros(3, int)},
            r"query_offset must have shape \(\) or \(B,\) = \(2,\), got \(3,\)",
        ),
        (TypeError, {"query_offset": 1.5}, "query_offset must hold integers, got float64"),
        (TypeError, {"normalizer": 2}, "normalizer must be a name or a Normalizer, got 2"),
        (
            ValueError,
            {"key": KEY[0]},
            r"key must have shape \(B, length, heads, head dim\), got \(12, 2, 8\)",
        ),
    ],
)
def test_windows_that_cannot_be(error, options, message):
    options = dict(query=QUERY[:, :T], key=KEY, value=VALUE, window=4, query_offset=OFFSETS) | options
    with pytest.raises(error, match=message):
        attnorm.windowed_attention(**options)


@dataclass(frozen=True)
class Both(Normalizer):
    needs = frozenset({"map", "distance", "position"})


def test_distances_in_slots_leave_no_absolute_positions():
    with pytest.raises(
        NotImplementedError, match=r"normalizer Both\(\) needs position, and distance or rows"
    ):
        attnorm.windowed_attention(QUERY[:, :T], KEY, VALUE, window=4, query_offset=0, normalizer=Both())
