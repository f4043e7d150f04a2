"""The grid of the attention contract: shapes, restrictions, dtypes, logits, normalisers; pairwise sampled."""

import itertools
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from tests import oracles

IMPLEMENTATIONS = ("reference", "chunked")
DTYPES = {"f32": np.float32, "bf16": np.dtype(jnp.bfloat16), "f16": np.float16, "f64": np.float64}
# The last three give logits without rounding errors, so that even at -1e9 nothing excuses a wrong result.
LOGITS = ("x1", "x30", "x1e4", "equal", "zero", "-1e9")
EXACT_LOGITS = ("equal", "zero", "-1e9")


@dataclass(frozen=True)
class Case:
    """One point of the grid. `choice` counts through the normaliser's parameters in tests/oracles.py."""

    lengths: tuple[int, int] = (97, 63)  # T, S
    width: int = 16  # H
    value_width: int | None = None  # Hv, H where None
    heads: tuple[int, int] = (4, 2)  # N, K
    batch: int = 1
    restriction: str = "none"
    normalizer: tuple[str, int] = ("l2", 0)
    dtype: str = "f32"
    logits: str = "x1"
    log_norm: bool = True
    poison: float | None = None  # put at every position that nobody may see
    blocks: tuple[int, int] | None = None  # of queries and keys, where the implementation has tiles

    @property
    def shape(self):
        """B, N, T, S"""
        return (self.batch, self.heads[0], *self.lengths)

    def __str__(self):
        name, choice = self.normalizer
        value_width = f"-{self.value_width}" if self.value_width else ""
        return (
            f"{name}{choice}_{self.restriction}_T{self.lengths[0]}-S{self.lengths[1]}_H{self.width}{value_width}_"
            f"N{self.heads[0]}-K{self.heads[1]}_B{self.batch}_{self.dtype}_{self.logits}"
            f"{'_lognorm' if self.log_norm else ''}{'' if self.poison is None else f'_{self.poison}'}"
            f"{f'_blocks{self.blocks[0]}-{self.blocks[1]}' if self.blocks else ''}"
        )


# All that plain JAX can be compared with; the others are in test_formulas.py.
NORMALIZERS = [(name, choice) for name in oracles.ORACLES for choice in range(len(oracles.choices(name)))]
# Which of B, N, T, S a mask has in full; the bias of the same case takes another of the sixteen.
BROADCASTS = ["".join(x) for x in itertools.product("1B", "1N", "1T", "1S")]
RESTRICTIONS = [
    "none",
    "causal",
    "causal-offset",
    "causal-offset-per-batch",
    "window",
    "window-left",
    "window-right",
    "window-causal",
    "window-offset",
    "key-lengths",
    "query-lengths",
    "both-lengths",
    "segments",
    "own-segments",
    "mask-S",
    "mask-TS",
    "mask-NTS",
    "empty-rows",
    "combination",
    "soft-cap",
    "sparse",
    *(f"mask-{x}" for x in BROADCASTS),
]


def restrict(case, rng):
    """The keyword arguments, mask and bias of a case; arrays in NumPy."""
    B, N, T, S = case.shape
    sizes = {"B": B, "N": N, "T": T, "S": S, "1": 1}

    def mask(*shape, density=0.7):
        return rng.random(shape) < density

    def bias(*shape):
        return rng.normal(size=shape)

    def lengths(limit):
        return np.array([limit // 2 + 1, 0, limit], np.int32)[np.arange(B) % 3]

    offsets = np.array([S // 3, -2, S], np.int32)[np.arange(B) % 3]
    ids = np.arange(T) * 3 // T, np.arange(S) * 3 // S
    query_ids, key_ids = (np.broadcast_to(x, (B, x.size)).astype(np.int32) for x in ids)
    kind, _, shape = case.restriction.partition("-")
    if kind == "mask":
        sizes_of_mask = tuple(sizes[x] for x in shape)
        options = {"mask": mask(*sizes_of_mask)}
        if len(shape) == 4:
            other = BROADCASTS[(7 * BROADCASTS.index(shape) + 3) % 16]
            options["bias"] = bias(*(sizes[x] for x in other))
        else:
            options["bias"] = bias(*sizes_of_mask)
        return options
    return {
        "none": lambda: {},
        "causal": lambda: {"is_causal": True},
        "causal-offset": lambda: {"is_causal": True, "query_offset": 5, "bias": bias(N, 1, S)},
        "causal-offset-per-batch": lambda: {"is_causal": True, "query_offset": offsets},
        "window": lambda: {"local_window_size": 9},
        "window-left": lambda: {"local_window_size": (5, None)},
        "window-right": lambda: {"local_window_size": (None, 4)},
        "window-causal": lambda: {"local_window_size": (12, 0), "is_causal": True},
        "window-offset": lambda: {"local_window_size": (8, 3), "query_offset": offsets},
        "key-lengths": lambda: {"key_value_seq_lengths": lengths(S)},
        "query-lengths": lambda: {"query_seq_lengths": lengths(T)},
        "both-lengths": lambda: {
            "query_seq_lengths": lengths(T)[::-1].copy(),
            "key_value_seq_lengths": lengths(S),
            "bias": bias(1, N, T, S),
        },
        "segments": lambda: {"query_segment_ids": query_ids + 1, "key_value_segment_ids": key_ids},
        "own-segments": lambda: {"query_segment_ids": query_ids},
        "empty-rows": lambda: {
            "mask": mask(B, 1, T, S) & (np.arange(T) % 3 != 0)[:, None],
            "bias": bias(B, N, T, S),
        },
        "combination": lambda: {
            "mask": mask(B, N, T, S, density=0.9),
            "bias": bias(1, N, T, S),
            "is_causal": True,
            "query_offset": 7,
            "local_window_size": (20, None),
            "query_seq_lengths": lengths(T)[::-1].copy(),
            "key_value_seq_lengths": lengths(S),
            "logits_soft_cap": 8.0,
            "scale": 0.3,
        },
        "soft-cap": lambda: {"logits_soft_cap": 2.0, "bias": bias(1, 1, T, S), "is_causal": True},
        "sparse": lambda: {"mask": mask(B, N, T, S, density=0.02), "bias": bias(B, 1, 1, S)},
    }[case.restriction]()


@dataclass(frozen=True)
class Inputs:
    """differentiable: query, key, value, bias and parameters; restrictions: arrays; static: the rest."""

    differentiable: dict
    restrictions: dict
    static: dict
    visible: np.ndarray
    clean: dict  # the differentiable ones without poison
    cotangents: tuple


def make_inputs(case):
    rng = np.random.default_rng(0)
    B, N, T, S = case.shape
    K, H = case.heads[1], case.width
    Hv = case.value_width or H
    dtype = DTYPES[case.dtype]
    options = restrict(case, rng)
    if case.logits in EXACT_LOGITS:
        options["scale"] = 2.0 ** -round(np.log2(H) / 2)
    bias = options.pop("bias", None)
    static = {k: v for k, v in options.items() if not isinstance(v, np.ndarray)}
    restrictions = {k: v for k, v in options.items() if isinstance(v, np.ndarray)}
    no_cap = {k: v for k, v in options.items() if k not in ("logits_soft_cap", "scale")}
    visible = oracles.visible_keys(case.shape, **no_cap)

    query, key = _query_and_key(case.logits, rng, (B, T, N, H), (B, S, K, H))
    arrays = {"query": query, "key": key, "value": rng.normal(size=(B, S, K, Hv))}
    if bias is not None:
        arrays["bias"] = np.zeros_like(bias) if case.logits in EXACT_LOGITS else bias
    arrays = {name: x.astype(dtype) for name, x in arrays.items()}
    name, choice = case.normalizer
    params = dict(oracles.choices(name)[choice][1])
    wide = np.float64 if case.dtype == "f64" else np.float32
    for key, x in params.items():
        if isinstance(x, tuple):
            params[key] = np.linspace(*x, N).astype(wide)
        elif isinstance(x, np.ndarray):
            params[key] = x.astype(wide)
    static["normalizer"] = name
    static["params"] = {k: x for k, x in params.items() if isinstance(x, float)}
    arrays["params"] = {k: x for k, x in params.items() if isinstance(x, np.ndarray)}
    cotangents = (rng.normal(size=(B, T, N, Hv)).astype(dtype), rng.normal(size=(B, T, N)).astype(wide))
    poisoned = arrays if case.poison is None else poison(arrays, visible, case.poison)
    return Inputs(poisoned, restrictions, static, visible, arrays, cotangents)


def _query_and_key(logits, rng, query_shape, key_shape):
    H = query_shape[-1]
    if logits == "zero":
        return np.zeros(query_shape), rng.normal(size=key_shape)
    if logits == "equal":
        signs = rng.choice([-1.0, 1.0], (2, H))
        return np.full(query_shape, signs[0]), np.full(key_shape, signs[1])
    if logits == "-1e9":
        return np.full(query_shape, -(2.0 ** np.round(np.log2(1e9 / H**0.5)))), np.ones(key_shape)
    size = {"x1": 1, "x30": 30, "x1e4": 1e4}[logits]
    return size * rng.normal(size=query_shape), rng.normal(size=key_shape)


def poison(arrays, visible, number):
    """The arrays with `number` wherever no pair of a query and a key that see each other has its part."""
    B, N, T, S = visible.shape
    K = arrays["key"].shape[2]
    poisoned = {name: x.copy() for name, x in arrays.items()}
    key_hidden = ~np.swapaxes(visible.any(2).reshape(B, K, N // K, S).any(2), 1, 2)
    poisoned["key"][key_hidden] = number
    poisoned["value"][key_hidden] = number
    poisoned["query"][~np.swapaxes(visible.any(-1), 1, 2)] = number
    if "bias" in arrays:
        bias = poisoned["bias"]
        bias[oracles.sum_to_shape(visible.astype(int), bias.shape) == 0] = number
    return poisoned


FACTORS = {
    "restriction": RESTRICTIONS,
    "lengths": [
        (1, 1),
        (1, 300),
        (300, 1),
        (97, 63),
        (128, 128),
        (192, 192),
        (200, 130),
        (256, 128),
        (577, 577),
        (1000, 1000),
    ],
    "normalizer": NORMALIZERS,
    "width": [16, 32, 40, 48, 64, 72, 80, 96, 128, 192, 256],
    "value_width": [None, 64, 128],
    "heads": [(1, 1), (4, 4), (8, 2), (6, 2), (4, 1)],
    "batch": [0, 1, 3],
    "dtype": list(DTYPES),
    "logits": list(LOGITS),
    "log_norm": [True, False],
    "poison": [None, float("nan"), float("inf"), float("-inf")],
    "blocks": [None, (32, 64), (56, 24)],
}
FAST_FACTORS = FACTORS | {
    "lengths": [(1, 1), (1, 300), (97, 63), (128, 128), (200, 130)],
    "width": [16, 40, 72],
    "value_width": [None, 64],
    "heads": [(1, 1), (4, 4), (6, 2), (4, 1)],
    "batch": [1, 1, 3, 3, 0],
    "dtype": ["f32", "f32", "f32", "bf16", "f16", "f64"],
}


def is_possible(case, cost):
    B, N, T, S = case.shape
    if case.dtype == "f16" and case.logits in ("x1e4", "-1e9"):
        return False  # queries or gradients beyond float16
    if case.restriction == "own-segments" and T != S:
        return False
    return B * N * T * (50 + S) * (50 + case.width) <= cost


def pairwise(factors, count, cost, seed):
    """`count` cases in which as many pairs of levels as possible occur; greedy and deterministic."""
    rng = np.random.default_rng(seed)
    names = list(factors)

    def pairs(levels):
        return {(a, levels[a], b, levels[b]) for a, b in itertools.combinations(range(len(names)), 2)}

    def random_case(first):
        while True:
            levels = [int(rng.integers(len(factors[name]))) for name in names]
            levels[0] = first
            case = Case(**{name: factors[name][k] for name, k in zip(names, levels, strict=True)})
            if is_possible(case, cost):
                return case, pairs(levels)

    covered, cases = set(), []
    num_first = len(factors[names[0]])
    stride = max(1, num_first // count)  # so that few cases have restrictions of all kinds
    for number in range(count):
        # Every restriction in turn, with the candidate that brings the most new pairs.
        candidates = [random_case(number * stride % num_first) for _ in range(60)]
        case, new = max(candidates, key=lambda candidate: len(candidate[1] - covered))
        covered |= new
        cases.append(case)
    return cases


FAST_CASES = pairwise(FAST_FACTORS, count=len(RESTRICTIONS) + 15, cost=2e7, seed=0)
SLOW_CASES = pairwise(FACTORS, count=3 * len(RESTRICTIONS), cost=3e8, seed=1)
# Every normaliser with every one of its parameters, causal and in float32, where the strict bound holds.
NORMALIZER_CASES = [
    replace(Case(), normalizer=normalizer, restriction="causal", lengths=(70, 70), heads=(2, 1))
    for normalizer in NORMALIZERS
]
