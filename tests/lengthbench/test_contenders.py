"""Controls against their formulas, on attention written out in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from attnorm import dot_product_attention
from attnorm.lengthbench.contenders import parse_contender

QKV = np.random.default_rng(0).normal(size=(3, 1, 5, 2, 4)).astype(np.float32)


def softmax_attention(query, key, value, temperature=1.0, p=1.0):
    logits = np.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1]) / temperature
    weights = np.where(np.tri(query.shape[1]), np.exp(logits), 0)
    weights /= np.sum(weights**p, axis=-1, keepdims=True) ** (1 / p)
    return np.einsum("bnts,bsnh->btnh", weights, value)


def attended(name, temperatures=(), index=0, parameters=None):
    contender = parse_contender(name, temperatures)
    attention = functools.partial(dot_product_attention, normalizer=contender.normalizers()[index])
    parameters = contender.initial_parameters(1, 2) if parameters is None else parameters
    return contender.attend(attention, parameters)(*QKV)


@pytest.mark.parametrize(
    ("control", "after"),
    [
        ("sqrt_position", lambda out: out * np.sqrt(np.arange(1, 6))[:, None, None]),
        ("head_rms", lambda out: out / np.sqrt(np.mean(out**2, axis=-1, keepdims=True))),
        (
            "head_layer",
            lambda out: (out - out.mean(-1, keepdims=True)) / out.std(-1, keepdims=True),
        ),
        (
            "global_layer",
            lambda out: (out - out.mean((-2, -1), keepdims=True)) / out.std((-2, -1), keepdims=True),
        ),
    ],
)
def test_controls_act_on_the_output(control, after):
    wanted = after(softmax_attention(*QKV))
    np.testing.assert_allclose(attended(f"softmax@{control}"), wanted, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize(("name", "p"), [("softmax", 1), ("l2", 2), ("lp(p=3)", 3)])
def test_temperatures_divide_the_logits(name, p):
    got = attended(f"{name}@temperature", temperatures=(0.5, 2.0), index=1)
    np.testing.assert_allclose(got, softmax_attention(*QKV, temperature=2, p=p), rtol=1e-5, atol=1e-5)


def test_learned_parameters_start_where_they_are_said_to_and_are_those_of_their_layer_and_head():
    np.testing.assert_allclose(
        attended("lp(p=3)@learned"), softmax_attention(*QKV, p=3), rtol=1e-5, atol=1e-5
    )

    contender = parse_contender("lp@learned", ())
    parameters = {"p": contender.initial_parameters(2, 2)["p"] + jnp.array([[0.0, 0.1], [0.2, 0.3]])}
    powers = contender.learned_values(parameters)["p"]
    assert len(set(powers.ravel().tolist())) == 4
    attend = contender.attend(dot_product_attention, parameters)
    for layer in range(2):
        got = attend(*QKV)
        for head in range(2):
            wanted = softmax_attention(*QKV[..., head : head + 1, :], p=float(powers[layer, head]))
            np.testing.assert_allclose(got[..., head : head + 1, :], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["lp@learned", "lp(p=1)@learned", "lp(p=4)@learned"])
def test_learned_parameters_go_far_with_what_adam_moves_a_weight_by(name):
    contender = parse_contender(name, ())
    start = contender.initial_parameters(1, 1)
    moved = contender.learned_values({"p": start["p"] + 1e-3})["p"] - contender.learned_values(start)["p"]
    assert moved > 5e-3


@pytest.mark.slow
def test_learned_parameters_receive_gradients():
    contender = parse_contender("sink@learned", ())

    def total(parameters):
        return jnp.sum(contender.attend(dot_product_attention, parameters)(*QKV))

    gradient = jax.grad(total)(contender.initial_parameters(1, 2))
    assert np.all(np.abs(gradient["b"]) > 1e-3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("softmaxx", "softmaxx"),
        ("softmax@warm", "after the @ must stand one of sqrt_position, .*got 'softmax@warm'"),
        ("sigmoid@temperature", "temperature is for softmax, l2 and lp, got 'sigmoid'"),
        ("softmax@learned", "softmax has no parameter that can be learned"),
    ],
)
def test_other_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        parse_contender(name, (1.0,))
