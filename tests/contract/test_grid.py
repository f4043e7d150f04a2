"""Values and all gradients of the attention against the float64 oracle, over the grid of the contract."""

import contextlib
import functools

import jax
import numpy as np
import pytest

import attnorm
from attnorm import chunked
from tests.checks import (
    assert_close,
    double_precision,
    plain_attention,
)
from tests.contract.cases import (
    EXACT_LOGITS,
    FAST_CASES,
    IMPLEMENTATIONS,
    NORMALIZER_CASES,
    SLOW_CASES,
    Case,
    make_inputs,
)
from tests.oracles import ORACLES, attention


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", NORMALIZER_CASES, ids=str)
def test_normalizer(case, implementation):
    check(case, implementation)


@pytest.mark.parametrize("implementation", ["chunked"])  # the slow cases have every restriction on both
@pytest.mark.parametrize("case", FAST_CASES, ids=str)
def test_case(case, implementation):
    check(case, implementation)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_slow_case(case, implementation):
    check(case, implementation)


def test_row_that_sees_one_key():
    """What such a row's weight owes cancels, to the last bit only where products are rounded alike."""
    case = Case(
        lengths=(1, 300),
        width=72,
        value_width=64,
        heads=(6, 2),
        restriction="window-causal",
        normalizer=("lp", 3),
    )
    check(case, "chunked")


def check(case, implementation):
    """Compares output, log norm and every gradient of one case with the oracle."""
    blocks = chunked.BlockSizes(*case.blocks) if case.blocks else None
    expected = oracle(case)
    inputs = make_inputs(case)
    has_log_norm = ORACLES[case.normalizer[0]].has_log_norm
    with double_precision() if case.dtype == "f64" else contextlib.nullcontext():
        plain, plain_gradients = plain_results(case)
        with chunked.block_sizes(blocks):
            output, log_norm, gradients = run(inputs, implementation, case.log_norm and has_log_norm)

    eps = float(jax.numpy.finfo(inputs.clean["query"].dtype).eps)
    strict = case.dtype == "f32" and case.logits == "x1"
    close = functools.partial(
        assert_close,
        largest_logit=0 if case.logits in EXACT_LOGITS else expected.largest_logit,
        strict=strict,
    )
    assert output.dtype == inputs.clean["query"].dtype
    largest_value = np.max(np.abs(inputs.clean["value"].astype(np.float64)), initial=0)
    close("output", output, expected.output, plain[0], scale=largest_value, eps=eps)
    if log_norm is not None:
        assert log_norm.dtype == (np.float64 if case.dtype == "f64" else np.float32)
        assert_close(
            "log norm",
            log_norm,
            expected.log_norm,
            plain[1],
            scale=1,
            largest_logit=expected.largest_logit,
            strict=strict,
        )
    names = [name for name in inputs.clean if name != "params"]
    for name in names + list(inputs.clean["params"]):
        group, plain_group = (
            (gradients, plain_gradients)
            if name in names
            else (gradients["params"], plain_gradients["params"])
        )
        close(
            f"gradient of {name}",
            group[name],
            expected.gradients[name],
            plain_group[name],
            scale=expected.terms[name],
            eps=eps,
        )


@functools.lru_cache(maxsize=2)
def oracle(case):
    inputs = make_inputs(case)
    static = {k: inputs.static[k] for k in ("scale", "logits_soft_cap") if k in inputs.static}
    arrays = dict(inputs.differentiable)
    d_output, d_log_norm = inputs.cotangents
    return attention(
        **{**arrays, "params": inputs.static["params"] | arrays["params"]},
        normalizer=inputs.static["normalizer"],
        visible=inputs.visible,
        **static,
        d_output=d_output,
        d_log_norm=d_log_norm if case.log_norm else None,
    )


@functools.lru_cache(maxsize=2)
def plain_results(case):
    inputs = make_inputs(case)
    static = {k: inputs.static[k] for k in ("scale", "logits_soft_cap") if k in inputs.static}

    @jax.jit
    def value_and_gradients(arrays, visible, cotangents):
        def function(arrays):
            params = inputs.static["params"] | arrays["params"]
            return plain_attention(
                **{**arrays, "params": params},
                normalizer=inputs.static["normalizer"],
                visible=visible,
                **static,
            )

        (output, log_norm), pullback = jax.vjp(function, arrays)
        d_output, d_log_norm = cotangents
        if not case.log_norm:
            d_log_norm = jax.numpy.zeros_like(d_log_norm)
        return (output, log_norm), *pullback((d_output, d_log_norm))

    return jax.device_get(value_and_gradients(inputs.clean, inputs.visible, inputs.cotangents))


def run(inputs, implementation, return_log_norm):
    """Output, log norm or None, and gradients of the package."""
    static = {k: v for k, v in inputs.static.items() if k not in ("normalizer", "params")}

    @jax.jit
    def value_and_gradients(arrays, restrictions, cotangents):
        def function(arrays):
            arrays = dict(arrays)
            params = inputs.static["params"] | arrays.pop("params")
            return attnorm.dot_product_attention(
                **arrays,
                **restrictions,
                **static,
                normalizer=attnorm.get_normalizer(inputs.static["normalizer"], **params),
                precision="highest",
                return_log_norm=return_log_norm,
                implementation=implementation,
            )

        results, pullback = jax.vjp(function, arrays)
        return results, *pullback(cotangents if return_log_norm else cotangents[0])

    results, gradients = jax.device_get(
        value_and_gradients(inputs.differentiable, inputs.restrictions, inputs.cotangents)
    )
    output, log_norm = results if return_log_norm else (results, None)
    return output, log_norm, gradients
