"""The loop that generates, with a model of a few numbers: the last token tells the logits of the next."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm import generate, make_cache

V = 6
TABLE = np.random.default_rng(0).normal(size=(V, V)).astype(np.float32)
PROMPT = np.array([[1, 4, 2], [3, 0, 0]])
LENGTHS = np.array([3, 1])


def decode(table, tokens, cache, num_tokens):
    """Keys are the tokens, and the logits depend on the last of them."""
    new = tokens[..., None, None].astype(jnp.float32)
    cache = cache.append(0, new, new, num_tokens).advance(num_tokens)
    last = jnp.take_along_axis(
        cache.key[0, ..., 0, 0], (cache.lengths[:, None] - 1) % cache.num_slots, axis=1
    )[:, 0]
    return table[last.astype(int)], cache


def empty(num_slots=12, **options):
    return make_cache(
        num_layers=1, batch_size=2, num_slots=num_slots, num_key_value_heads=1, head_dim=1, **options
    )


def run(decode=decode, table=TABLE, cache=None, prompt=PROMPT, **options):
    return generate(
        decode, table, empty() if cache is None else cache, prompt, **{"max_new_tokens": 5} | options
    )


def greedy(token, count):
    """The most probable continuation, by NumPy."""
    out = []
    for _ in range(count):
        token = int(TABLE[token].argmax())
        out.append(token)
    return out


def test_greedy_rows_of_different_lengths():
    out = run(prompt_lengths=LENGTHS)
    np.testing.assert_array_equal(out.tokens, [greedy(2, 5), greedy(3, 5)])
    np.testing.assert_array_equal(out.lengths, [5, 5])
    stored = np.asarray(out.cache.key[0, ..., 0, 0])
    np.testing.assert_array_equal(stored[0, :7], [1, 4, 2, *greedy(2, 4)])  # all but the last new token
    np.testing.assert_array_equal(stored[1, :5], [3, *greedy(3, 4)])


def test_prompt_in_chunks_that_rows_leave_early():
    """Of a window of 2 and 4 slots, two tokens can enter at once."""
    prompt = np.array([[1, 5, 4, 0, 2], [4, 3, 0, 0, 0]])
    out = run(cache=empty(4, window=2), prompt=prompt, prompt_lengths=np.array([5, 2]))
    np.testing.assert_array_equal(out.tokens, [greedy(2, 5), greedy(3, 5)])


def test_rows_end_at_their_own_time_and_go_on_from_the_cache():
    end = greedy(2, 5)[2]
    out = run(end=end, prompt_lengths=LENGTHS)
    for row, first in enumerate([2, 3]):
        expected = greedy(first, 5)
        length = expected.index(end) + 1 if end in expected else 5
        assert out.lengths[row] == length
        np.testing.assert_array_equal(out.tokens[row], expected[:length] + [end] * (5 - length))
        assert out.cache.lengths[row] == LENGTHS[row] + length - 1
    lengths = np.asarray(out.cache.lengths)
    again = run(cache=out.cache, prompt=np.array([[5], [2]]), max_new_tokens=2)
    np.testing.assert_array_equal(again.tokens, [greedy(5, 2), greedy(2, 2)])
    np.testing.assert_array_equal(again.cache.lengths, lengths + 2)


def test_one_program_that_donates_the_cache():
    traced = []

    def counted(*arguments):
        traced.append(None)
        return decode(*arguments)

    cache = empty()
    run(counted, cache=cache, max_new_tokens=7)
    assert cache.key.is_deleted() and cache.value.is_deleted()
    once = len(traced)
    run(counted, table=TABLE + 1, prompt=PROMPT[:, ::-1], max_new_tokens=7)
    assert len(traced) == once  # other numbers of the same shapes
    run(counted, max_new_tokens=3)
    assert once < len(traced) <= 2 * once  # another program, that is traced no more often


def test_draws_follow_the_probabilities():
    """Logits that do not depend on the token, so that every token drawn is an independent sample."""
    logits = np.log(np.array([0.4, 0.3, 0.15, 0.1, 0.04, 0.01], np.float32))
    table = np.tile(logits, (V, 1))

    def shares(**options):
        out = generate(
            decode, table, empty(2002), PROMPT[:, :1], max_new_tokens=2000, rng=jax.random.key(0), **options
        )
        assert np.any(np.asarray(out.tokens[0]) != np.asarray(out.tokens[1]))
        return np.bincount(np.ravel(out.tokens), minlength=V) / 4000

    np.testing.assert_allclose(shares(temperature=1.0), np.exp(logits), atol=0.03)
    np.testing.assert_allclose(
        shares(temperature=0.5), np.exp(2 * logits) / np.exp(2 * logits).sum(), atol=0.03
    )
    np.testing.assert_allclose(shares(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0, 0, 0], atol=0.03)
    np.testing.assert_allclose(
        shares(temperature=1.0, top_p=0.8), np.array([8, 6, 3, 0, 0, 0]) / 17, atol=0.03
    )


def test_of_equal_probabilities_the_first_are_drawn():
    def drawn(**options):
        out = generate(
            decode,
            np.zeros((V, V), np.float32),
            empty(202),
            PROMPT[:, :1],
            max_new_tokens=200,
            rng=jax.random.key(0),
            temperature=1.0,
            **options,
        )
        return set(np.ravel(out.tokens).tolist())

    assert drawn(top_k=2) == {0, 1}
    assert drawn(top_p=0.4) == {0, 1, 2}


def test_the_smallest_temperature_takes_the_most_probable_token():
    least = float(np.finfo(np.float32).tiny)
    out = run(rng=jax.random.key(0), temperature=least, top_p=least, prompt_lengths=LENGTHS)
    np.testing.assert_array_equal(out.tokens, run(prompt_lengths=LENGTHS).tokens)


def test_the_same_key_draws_the_same():
    options = dict(temperature=1.0, prompt_lengths=LENGTHS)
    first, again, other = (run(rng=jax.random.key(seed), **options).tokens for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
    np.testing.assert_array_equal(
        run(rng=jax.random.key(1), top_k=1, **options).tokens, run(prompt_lengths=LENGTHS).tokens
    )


# Bad input.


@pytest.mark.parametrize(
    "error, options, message",
    [
        (ValueError, {"prompt": PROMPT[:, :0]}, r"the cache's B = 2 and at least one token, got \(2, 0\)"),
        (ValueError, {"prompt": PROMPT[:1]}, r"prompt must have shape \(B, T\), with the cache's B = 2"),
        (TypeError, {"prompt": PROMPT + 0.5}, "prompt must hold integers, got float64"),
        (
            ValueError,
            {"prompt_lengths": np.array([3, 0])},
            r"prompt_lengths must be from 1 to 3, got \[3, 0\]",
        ),
        (
            ValueError,
            {"prompt_lengths": np.array([4, 1])},
            r"prompt_lengths must be from 1 to 3, got \[4, 1\]",
        ),
        (
            ValueError,
            {"prompt_lengths": np.array([3])},
            r"prompt_lengths must have shape \(B,\) = \(2,\), got \(1,\)",
        ),
        (ValueError, {"max_new_tokens": 0}, "max_new_tokens must be at least 1, got 0"),
        (TypeError, {"max_new_tokens": 2.0}, "max_new_tokens must be an int, got 2.0"),
        (
            ValueError,
            {"max_new_tokens": 11, "prompt_lengths": np.array([1, 3])},
            "max_length = 12 tokens; row 1 has 0, its prompt 3, and max_new_tokens is 11",
        ),
        (ValueError, {"temperature": 1.0}, "rng must be a PRNG key where temperature = 1.0 > 0, got None"),
        (ValueError, {"temperature": -1.0}, r"temperature must be 0, or from 1.18e-38 to 3.4e\+38, got -1.0"),
        (ValueError, {"temperature": 1e-46}, "temperature must be 0, or from 1.18e-38 .* got 1e-46"),
        (ValueError, {"temperature": 1e39}, "temperature must be 0, or from 1.18e-38 .* got 1e\\+39"),
        (TypeError, {"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        (ValueError, {"top_k": 3}, "needs temperature > 0, got 0"),
        (ValueError, {"top_p": 1.5, "temperature": 1.0}, "top_p must be from 1.18e-38 to 1, got 1.5"),
        (ValueError, {"top_p": 1e-46, "temperature": 1.0}, "top_p must be from 1.18e-38 to 1, got 1e-46"),
        (ValueError, {"top_k": 0, "temperature": 1.0}, "top_k must be at least 1, got 0"),
        (ValueError, {"end": -1}, "end must be at least 0, got -1"),
        (TypeError, {"cache": {}}, r"cache must be a Cache, as of make_cache, got \{\}"),
    ],
)
def test_bad_input_is_refused_before_anything_is_traced(error, options, message):
    with pytest.raises(error, match=message):
        run(decode=None, **options)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda *a: decode(*a)[0],
        lambda *a: (decode(*a)[0][:, None], decode(*a)[1]),
        lambda *a: (decode(*a)[0], a[2].key),
    ],
)
def test_decode_that_returns_something_else(wrong):
    with pytest.raises(
        TypeError, match=r"decode must return logits \(2, V\) and a cache like the one it got"
    ):
        run(wrong)


@pytest.mark.parametrize("token", [V, 2**31])
def test_an_end_outside_the_vocabulary(token):
    with pytest.raises(ValueError, match=f"end must be from 0 to 5, of a vocabulary of 6, got {token}"):
        run(end=token)


@pytest.mark.parametrize("token", [-1, V])
def test_a_prompt_outside_the_vocabulary(token):
    prompt = np.array([[1, 2, 3], [3, 0, token]])
    with pytest.raises(ValueError, match=f"prompt must be from 0 to 5, of a vocabulary of 6, got {token}"):
        run(prompt=prompt)
    run(prompt=prompt, prompt_lengths=np.array([3, 2]))  # padding may be anything


def test_the_last_token_needs_no_room():
    out = run(cache=empty(7), max_new_tokens=5)
    np.testing.assert_array_equal(out.cache.lengths, 7)
