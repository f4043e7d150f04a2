"""Ring attention on virtual devices against the float64 oracle, as ``python -m tests.context.grid``.

Arguments name cases and shapes of meshes, as in ``causal:2x4x1``: over batch, context and heads.
"""

import functools
import math
import sys

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import attnorm
from tests.contract.helpers import assert_matches_oracle, make_arrays

# Not a multiple of any number of devices, so that the last blocks are padded.
T, N, K = 50, 4, 2
IDS = np.repeat([[3, 1, 4], [0, 1, 0]], [21, 13, 16], axis=1).astype(np.int32)
PER_HEAD = np.array([0.7, 1.0, 2.0, 3.5], np.float32)

CASES = {
    "none": dict(normalizer="l2"),
    # In zigzag order; of a device's blocks of queries and keys only those meet that see each other.
    "causal": dict(
        normalizer="lp", params={"p": PER_HEAD}, is_causal=True, query_segment_ids=IDS, logits_soft_cap=3.0
    ),
    # Of eight devices each meets the keys of three.
    "window": dict(normalizer="linf", local_window_size=(7, 4)),
    "window-causal": dict(
        normalizer="sink", params={"b": PER_HEAD}, local_window_size=(9, 0), is_causal=True
    ),
    "window-left": dict(normalizer="softmax_plus_n", params={"n": PER_HEAD}, local_window_size=(5, None)),
    "window-right": dict(normalizer="softmax", local_window_size=(None, 4)),
    "offset": dict(normalizer="l2", is_causal=True, query_offset=-3),
    "offset-per-batch": dict(normalizer="alibi", is_causal=True, query_offset=np.array([5, -2], np.int32)),
    "lengths": dict(
        normalizer="ssmax",
        params={"h": PER_HEAD},
        is_causal=True,
        query_seq_lengths=np.array([50, 20], np.int32),
        key_value_seq_lengths=np.array([30, 0], np.int32),
    ),
    "counted-segments": dict(normalizer="log_n", query_segment_ids=IDS, local_window_size=(12, 3)),
    "position": dict(normalizer="llama4", is_causal=True, params={"floor_scale": 8.0}),
    "several-numerators": dict(
        normalizer="affine", params={"alpha": PER_HEAD}, is_causal=True, log_norm=False
    ),
    "extrema": dict(normalizer="sa_softmax", is_causal=True, log_norm=False),
    "mean": dict(normalizer="nap", params={"gain": PER_HEAD}, is_causal=True, log_norm=False),
    "without-maximum": dict(normalizer="sigmoid", is_causal=True, log_norm=False),
    "cross": dict(normalizer="l2", S=37, query_segment_ids=IDS, key_value_segment_ids=IDS[:, 5:42]),
    "one-key-head": dict(normalizer="lp", params={"p": PER_HEAD}, is_causal=True, K=1),
    "gathered-one-key-head": dict(
        variant="all_gather", normalizer="lp", params={"p": PER_HEAD}, is_causal=True, K=1
    ),
    # In zigzag order, of which every device gathers the segment ids to count keys.
    "counted-causal-segments": dict(
        normalizer="ssmax", params={"h": PER_HEAD}, is_causal=True, query_segment_ids=IDS
    ),
    "gathered": dict(
        variant="all_gather", normalizer="lp", params={"p": PER_HEAD}, is_causal=True, query_segment_ids=IDS
    ),
    "gathered-rows": dict(variant="all_gather", normalizer="entmax15", is_causal=True, log_norm=False),
}

# What hides keys, each to be seen on any number of devices.
MASKS = (
    "none",
    "causal",
    "window",
    "window-causal",
    "window-left",
    "window-right",
    "offset",
    "offset-per-batch",
    "lengths",
    "counted-segments",
    "cross",
)


def check(name, shape):
    options = dict(CASES[name])
    query, key, value = make_arrays(B=2, T=T, S=options.pop("S", T), N=N, K=options.pop("K", K), H=16, Hv=24)
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    attend = functools.partial(
        attnorm.ring_attention,
        mesh=Mesh(devices, ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3),
        batch_axes="data",
        head_axes="tensor",
        variant=options.pop("variant", "ring"),
        precision="highest",
    )
    assert_matches_oracle(attend, query, key, value, tolerance=1e-5, **options)


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        name, shape = argument.split(":")
        check(name, tuple(map(int, shape.split("x"))))
        print(argument, "ok", flush=True)
