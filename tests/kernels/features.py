"""What the contract of attention asks of a fused kernel, row by row: calls that it may not refuse.

Dropout, float64 and forward-mode differentiation are all that it may.
"""

import jax
import jax.numpy as jnp
import numpy as np

import attnorm
from attnorm import attention
from tests import oracles

B, T, S, N, K = 2, 300, 400, 4, 2


def floats(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def ints(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


BROADCASTS = [(B, N, T, S), (1, N, T, S), (B, 1, 1, S), (1, 1, T, 1), (1, N, 1, 1), (1, 1, 1, 1)]
SEGMENTS = dict(query_segment_ids=ints(B, T), key_value_segment_ids=ints(B, S))
LENGTHS = dict(query_seq_lengths=ints(B), key_value_seq_lengths=ints(B))
WIDTHS = [16, 32, 40, 48, 64, 72, 80, 96, 128, 192, 256]
HIGHEST = dict(precision="highest", is_causal=True)


def rule_of(name):
    """Parameters of a normaliser: those that the tests try last, arrays wherever it takes them."""
    _, params = oracles.choices(name)[-1]
    shapes = {k: (N,) if isinstance(x, tuple) else np.shape(x) for k, x in params.items()}
    return {
        k: x if isinstance(x, float | int | str) else floats(*shapes[k], dtype=jnp.float32)
        for k, x in params.items()
    }


def is_served(name, params):
    """Whether the kernels serve the rule that a normaliser is with these parameters of tests/oracles.py."""
    rule = attnorm.get_normalizer(name, **oracles.as_arrays(params, N))
    return "pallas_tpu" in attention.implementations_of(rule)


# Of each normaliser that the kernels serve, the first parameters with which they do. Of the rest all rules say what
# they need and the kernels lack.
FUSED = {
    name: params
    for of_name in map(oracles.choices, attnorm.normalizer_names())
    for name, params in reversed(of_name)
    if is_served(name, params)
}
# Arguments of the attention; arrays are traced. "rule" are parameters of the normaliser, "shape" the dimensions.
CONTRACT = {
    "causal": {
        "T != S": dict(is_causal=True),
        "T > S": dict(is_causal=True, shape=dict(T=S, S=T)),
        "not": {},
    },
    "offset": {
        "number": dict(is_causal=True, query_offset=7),
        "scalar": dict(is_causal=True, query_offset=ints()),
        "per batch": dict(is_causal=True, query_offset=ints(B)),
    },
    "window": {
        "both sides": dict(local_window_size=(100, 50), query_offset=7),
        "one number": dict(local_window_size=9),
        "left": dict(local_window_size=(0, None)),
        "right": dict(local_window_size=(None, 20)),
        "causal": dict(local_window_size=(30, 0), is_causal=True),
    },
    "lengths": {
        "both": LENGTHS,
        "of queries": dict(query_seq_lengths=ints(B)),
        "of keys": dict(key_value_seq_lengths=ints(B), is_causal=True),
    },
    "segments": {
        "both": SEGMENTS,
        "of queries alone": dict(query_segment_ids=ints(B, T), shape=dict(S=T)),
    },
    "mask": {str(shape): dict(mask=floats(*shape, dtype=bool)) for shape in BROADCASTS},
    "bias": {str(shape): dict(bias=floats(*shape)) for shape in BROADCASTS},
    "logits": {
        "soft cap": dict(is_causal=True, logits_soft_cap=20.0),
        "scale": dict(scale=0.3),
    },
    "heads": {
        "one query head per key head": dict(shape=dict(K=N)),
        "three query heads per key head": dict(shape=dict(N=6)),
        "one key head": dict(is_causal=True, shape=dict(K=1)),
    },
    "head dims": {f"{H}": dict(is_causal=True, shape=dict(H=H, Hv=H)) for H in WIDTHS}
    | {f"{H} and {Hv}": dict(shape=dict(H=H, Hv=Hv)) for H, Hv in ((192, 40), (64, 128), (16, 256))},
    "lengths of arrays": {
        "one query and key": dict(shape=dict(T=1, S=1)),
        "one query": dict(is_causal=True, query_offset=ints(B), shape=dict(T=1)),
        "whole blocks": dict(is_causal=True, shape=dict(T=256, S=512)),
    },
    "dtype": {
        "bfloat16, highest": HIGHEST,
        "float32": dict(is_causal=True, dtype=jnp.float32),
        "float32, highest": HIGHEST | dict(dtype=jnp.float32),
        "float16": dict(is_causal=True, dtype=jnp.float16),
    },
    "normalizer": {name: dict(normalizer=name, rule=rule_of(name)) for name in FUSED}
    | {
        "odd p": dict(normalizer="lp", rule=dict(p=2.5)),
        "p per head in float32": dict(normalizer="lp", rule=rule_of("lp"), dtype=jnp.float32),
    },
    "together": {
        "everything": dict(
            mask=floats(B, N, T, S, dtype=bool),
            bias=floats(1, N, T, S),
            is_causal=True,
            query_offset=ints(B),
            local_window_size=(300, 10),
            logits_soft_cap=8.0,
            **LENGTHS,
            **SEGMENTS,
        )
    },
}
FEATURES = {f"{row}: {name}": case for row, cases in CONTRACT.items() for name, case in cases.items()}


def make_call(feature, **common):
    """-> the attention as a function (arrays, rule), and abstract arrays and parameters to trace it with."""
    return call_of(FEATURES[feature], **common)


def call_of(case, **common):
    """The same for a case that is in no row."""
    options = dict(case)
    dtype = options.pop("dtype", jnp.bfloat16)
    sizes = dict(T=T, S=S, N=N, K=K, H=64, Hv=64) | options.pop("shape", {})
    rule = options.pop("rule", {})
    name = options.pop("normalizer", "l2")

    def is_array(x):
        return isinstance(x, jax.ShapeDtypeStruct)

    arrays = dict(
        query=floats(B, sizes["T"], sizes["N"], sizes["H"], dtype=dtype),
        key=floats(B, sizes["S"], sizes["K"], sizes["H"], dtype=dtype),
        value=floats(B, sizes["S"], sizes["K"], sizes["Hv"], dtype=dtype),
        **{k: x for k, x in options.items() if is_array(x)},
    )
    constants = {k: x for k, x in options.items() if not is_array(x)}
    static_rule = {k: x for k, x in rule.items() if not is_array(x)}

    def attend(arrays, rule):
        normalizer = attnorm.get_normalizer(name, **rule, **static_rule)
        has_log_norm = type(normalizer).log_norm is not attnorm.Normalizer.log_norm
        return attnorm.dot_product_attention(
            **arrays, **constants, **common, normalizer=normalizer, return_log_norm=has_log_norm
        )

    return attend, arrays, {k: x for k, x in rule.items() if is_array(x)}
