"""Faults that attention implementations are known for; each test carries the name of one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from tests.contract.helpers import (
    assert_matches_oracle,
    assert_near,
    make_arrays,
    make_cotangents,
    make_program,
    run,
)


@pytest.mark.parametrize("T, S", [(20, 61), (61, 20)])
def test_wrong_results_when_query_and_key_lengths_differ(attend, T, S):
    assert_matches_oracle(attend, *make_arrays(T=T, S=S), is_causal=True)


def test_lengths_that_are_no_multiple_of_the_block(attend):
    assert_matches_oracle(attend, *make_arrays(B=1, T=131, S=103, N=2, K=1), local_window_size=(40, 30))


def test_padding_in_blocks_read_as_data(attend):
    # A padded key of zeros would have logit 0, and take all the weight from logits around -60.
    query, key, value = make_arrays(T=35, S=37)
    query[..., 0], key[..., 0] = -240.0, 1.0
    for normalizer in ("l2", "softmax"):
        assert_matches_oracle(attend, query, key, value, normalizer=normalizer, tolerance=1e-4)


def test_key_lengths_alone_ignored(attend):
    assert_matches_oracle(attend, *make_arrays(), key_value_seq_lengths=np.array([17, 0], np.int32))


def test_query_lengths_alone_ignored(attend):
    output, _ = assert_matches_oracle(attend, *make_arrays(), query_seq_lengths=np.array([17, 0], np.int32))
    assert not output[0, 17:].any() and not output[1].any()


@pytest.mark.parametrize("window", [7, (3, None), (None, 5), (0, 0)], ids=str)
def test_window_without_mask_ignored(attend, window):
    assert_matches_oracle(attend, *make_arrays(), local_window_size=window)


def test_window_with_no_right_side_sees_the_future(attend):
    query, key, value = make_arrays(T=40, S=40)
    later = np.arange(40) > 20
    changed = [np.where(later[:, None, None], 50 + x, x) for x in (key, value)]
    call = jax.jit(lambda *args: attend(*args, local_window_size=(6, 0)))
    before, after = call(query, key, value), call(query, *changed)
    np.testing.assert_array_equal(before[:, :21], after[:, :21])
    assert np.abs(before - after)[:, 21:].min(axis=(0, 2, 3)).max() > 0.1


def test_exact_forward_with_a_less_precise_backward(attend):
    assert_matches_oracle(attend, *make_arrays(B=1, T=96, S=96, H=64), tolerance=2e-6)


def test_documents_leaking_across_packing(attend):
    query, key, value = make_arrays(B=1, T=50, S=50)
    ids = np.repeat([3, 1, 3], [20, 13, 17]).astype(np.int32)[
        None
    ]  # an id may come back, and is the same one
    packed, _ = assert_matches_oracle(
        attend, query, key, value, query_segment_ids=ids, key_value_segment_ids=ids
    )
    alone = attend(query[:, 20:33], key[:, 20:33], value[:, 20:33])
    assert_near("document", packed[:, 20:33], alone, 1e-6)

    def of_one_document(key, value):
        return attend(query, key, value, query_segment_ids=ids, key_value_segment_ids=ids)[:, 20:33].sum()

    for gradient in jax.jit(jax.grad(of_one_document, (0, 1)))(key, value):
        assert not gradient[:, :20].any() and not gradient[:, 33:].any() and gradient[:, 20:33].any()


def test_bool_mask_turned_into_an_additive_one(attend):
    query, key, value = make_arrays(B=1, T=20, S=30)
    mask = np.random.default_rng(0).random((20, 30)) < 0.5
    bias = np.where(mask, 0, 1e9).astype(np.float32)
    assert_matches_oracle(attend, query, key, value, bias, mask=mask)


def test_mask_without_its_query_axis(attend):
    query, key, value = make_arrays(B=1, T=30, S=30)
    rng = np.random.default_rng(0)
    assert_matches_oracle(attend, query, key, value, mask=rng.random((30, 30)) < 0.3)
    assert_matches_oracle(attend, query, key, value, mask=rng.random((30, 1)) < 0.5)


def test_float16_mask_constants_giving_nan(attend):
    arrays = make_arrays(B=1, T=20, S=30)
    mask = np.random.default_rng(0).random((20, 30)) < 0.5
    mask[3] = False
    exact, _ = assert_matches_oracle(attend, *arrays, mask=mask)
    halves = [jnp.asarray(x, jnp.float16) for x in arrays]
    output, pullback = jax.vjp(jax.jit(lambda *args: attend(*args, mask=mask)), *halves)
    assert_near("output", output, exact, 5e-3)
    for gradient in pullback(output):
        assert np.isfinite(gradient).all()


def test_mask_value_that_very_negative_logits_fall_below(attend):
    # Visible logits below -0.7 of the largest float: no finite mask value may lie above them.
    query, key, value = make_arrays(B=1, T=20, S=30)
    mask = np.random.default_rng(0).random((20, 30)) < 0.5
    bias = np.where(mask, np.float32(-3e38), 0)
    cotangents = make_cotangents(query, value)
    arrays = {"query": query, "key": key, "value": value, "bias": bias}
    output, _, gradients = run(attend, arrays, normalizer="softmax", mask=mask, cotangents=cotangents)
    uniform = mask / mask.sum(-1, keepdims=True)
    expected = np.einsum("ts,bsnh->btnh", uniform, np.repeat(value, 2, axis=2))
    assert_near("output", output, expected, 2e-6)
    d_value = np.einsum("ts,btnh->bsnh", uniform, cotangents[0]).reshape(1, 30, 2, 2, 16).sum(3)
    assert_near("gradient of value", gradients["value"], d_value, 2e-6)
    for name, gradient in gradients.items():
        assert np.abs(gradient).max() < 1e3, name


def test_sink_without_gradient(attend):
    b = np.array([-1.0, 0.5, 2.0, 4.0], np.float32)
    _, gradients = assert_matches_oracle(attend, *make_arrays(), normalizer="sink", params={"b": b})
    assert (np.abs(gradients["b"]) > 1e-3).all()


def test_sink_with_an_empty_row_giving_nan(attend):
    mask = np.ones((50, 61), bool)
    mask[[0, 30]] = False
    b = np.array([-1.0, 0.5, 2.0, 4.0], np.float32)
    output, _ = assert_matches_oracle(attend, *make_arrays(), normalizer="sink", params={"b": b}, mask=mask)
    assert not output[:, [0, 30]].any()


def test_soft_cap_missing_in_the_backward(attend):
    assert_matches_oracle(attend, *make_arrays(), logits_soft_cap=0.7, scale=1.0, tolerance=4e-6)


@pytest.mark.parametrize(
    "shape", [(2, 4, 50, 61), (1, 4, 50, 61), (2, 1, 1, 61), (4, 50, 1), (61,), (1, 1, 1, 1)]
)
def test_bias_gradient_only_for_a_batch_of_one(attend, shape):
    bias = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    # A bias that is the same for every key of a row only shifts it: its gradient is that of the log norm.
    # Of one number it adds up all 24,400 slopes, which leave little.
    cancelling = ("bias",) if bias.size == 1 else ()
    assert_matches_oracle(attend, *make_arrays(), bias, tolerance=4e-6, cancelling=cancelling)


def test_vmap_with_bias_crashing(attend):
    query, key, value = make_arrays(T=20, S=30)
    bias = np.random.default_rng(2).normal(size=(3, 4, 20, 30)).astype(np.float32)

    def loss(bias):
        return jnp.sum(attend(query, key, value, bias) ** 2)

    mapped = jax.jit(jax.vmap(jax.value_and_grad(loss)))(bias)
    single = jax.jit(jax.value_and_grad(loss))
    for k in range(3):
        assert_near("loss", mapped[0][k], single(bias[k])[0], 1e-5)
        assert_near("gradient", mapped[1][k], single(bias[k])[1], 2e-6)


def count_exponentials(function, *args):
    """How many exponentials the program holds: some for each time that the forward runs."""
    return str(jax.make_jaxpr(function)(*args)).count(" exp ")


def test_remat_running_the_forward_twice(attend):
    query, key, value = make_arrays(B=1, T=40, S=40, N=2, K=1)

    def loss(*args):
        return jnp.sum(attend(*args, is_causal=True) ** 2)

    forward = count_exponentials(loss, query, key, value)
    both = count_exponentials(jax.grad(loss, (0, 1, 2)), query, key, value)
    again = count_exponentials(jax.grad(jax.checkpoint(loss), (0, 1, 2)), query, key, value)
    assert forward > 0
    assert again <= both + forward


def test_remat_running_a_saved_forward_again():
    query, key, value = make_arrays(B=1, T=40, S=40, N=2, K=1)
    policy = jax.checkpoint_policies.save_only_these_names("attnorm_output", "attnorm_row_state")

    def loss(*args):
        output = attnorm.dot_product_attention(*args, is_causal=True, implementation="chunked")
        return jnp.sum(output**2)

    both = count_exponentials(jax.grad(loss, (0, 1, 2)), query, key, value)
    saved = jax.checkpoint(loss, policy=policy)
    assert count_exponentials(jax.grad(saved, (0, 1, 2)), query, key, value) == both


@pytest.mark.parametrize("return_log_norm", [False, True])
def test_forward_rule_with_another_output_than_the_primal(attend, return_log_norm):
    arrays = make_arrays(T=20, S=30)

    def call(*args):
        return attend(*args, is_causal=True, return_log_norm=return_log_norm)

    primal = jax.jit(call)(*arrays)
    forward = jax.jit(lambda *args: jax.vjp(call, *args)[0])(*arrays)
    assert jax.tree.structure(primal) == jax.tree.structure(forward)
    for a, b in zip(jax.tree.leaves(primal), jax.tree.leaves(forward), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_results_that_differ_from_run_to_run(attend):
    query, key, value = make_arrays()
    bias = np.random.default_rng(2).normal(size=(1, 4, 50, 61)).astype(np.float32)
    arrays = {"query": query, "key": key, "value": value, "bias": bias}
    options = {"cotangents": make_cotangents(query, value), "is_causal": True}
    params = {"p": np.array([1.0, 2.0, 3.0, 4.0], np.float32)}
    program = make_program(attend, normalizer="lp", params=params, **options)
    for a, b in zip(jax.tree.leaves(program(arrays)), jax.tree.leaves(program(arrays)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_log_norm_without_gradient(attend):
    # Composed from logsumexps: out_2 = out_1 exp(LSE(s) - LSE(2 s) / 2), all of it differentiated.
    query, key, value = make_arrays(T=20, S=30)

    def composed(query, key, value):
        output, norm = attend(query, key, value, normalizer="softmax", return_log_norm=True)
        _, twice = attend(2 * query, key, value, normalizer="softmax", return_log_norm=True)
        return output * jnp.exp(norm - twice / 2)[..., None]

    direct_output, direct = jax.vjp(jax.jit(lambda *args: attend(*args, normalizer="l2")), query, key, value)
    output, pullback = jax.vjp(jax.jit(composed), query, key, value)
    assert_near("output", output, direct_output, 5e-6)
    for got, expected in zip(pullback(output), direct(output), strict=True):
        assert_near("gradient", got, expected, 5e-6)


def test_softmax_that_is_not_the_one_of_jax(attend):
    query, key, value = make_arrays(K=2)
    rng = np.random.default_rng(0)
    bias, mask = rng.normal(size=(2, 4, 50, 61)).astype(np.float32), rng.random((2, 4, 50, 61)) < 0.7
    mask[..., 0] = True
    lengths = np.array([40, 61], np.int32)
    for options in (
        {"mask": mask, "bias": bias},
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (9, 0), "scale": 0.5},
        {"key_value_seq_lengths": lengths},
    ):

        def both(query, key, value, options=options):
            theirs = jax.nn.dot_product_attention(query, key, value, **options, implementation="xla")
            return theirs, attend(query, key, value, normalizer="softmax", **options)

        with jax.default_matmul_precision("highest"):
            (theirs, ours), pullback = jax.vjp(jax.jit(both), query, key, value)
            zeros = jnp.zeros_like(ours)
            their_gradients, our_gradients = pullback((theirs, zeros)), pullback((zeros, theirs))
        assert_near("output", ours, theirs, 3e-6)
        for got, expected in zip(our_gradients, their_gradients, strict=True):
            assert_near("gradient", got, expected, 5e-6)
