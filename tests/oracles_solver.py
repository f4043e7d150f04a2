"""Formulas of the normalisers that solve for a level or read a row more than once, as in tests/oracles.py.

Each takes the visible logits of a row along the last axis, real or complex (for complex-step gradients), and the row.
"""

import numpy as np


def sum_of(x):
    return np.sum(x, axis=-1, keepdims=True)


def softmax(logits):
    exponentials = np.exp(logits - np.max(logits.real, axis=-1, keepdims=True, initial=-np.inf))
    return exponentials / sum_of(exponentials)


def sorted_sums(logits):
    """The logits in descending order, and means of the k largest and of their squares, for every k."""
    order = np.argsort(-logits.real, axis=-1, kind="stable")
    ranked = np.take_along_axis(logits, order, axis=-1)
    count = np.arange(1, logits.shape[-1] + 1)
    return ranked, count, np.cumsum(ranked, -1) / count, np.cumsum(ranked**2, -1) / count


def sparsemax(logits, row):
    """By sorting: arXiv 1602.02068, algorithm 1."""
    if not logits.shape[-1]:
        return logits
    ranked, count, mean, _ = sorted_sums(logits - np.max(logits.real, axis=-1, keepdims=True))
    tau = mean - 1 / count
    support = sum_of((ranked.real > tau.real).astype(int))
    threshold = np.take_along_axis(tau, support - 1, axis=-1)
    excess = logits - np.max(logits.real, axis=-1, keepdims=True) - threshold
    return np.where(excess.real > 0, excess, 0)


def entmax15(logits, row):
    """By sorting: arXiv 1905.05702, algorithm 2."""
    if not logits.shape[-1]:
        return logits
    halved = (logits - np.max(logits.real, axis=-1, keepdims=True)) / 2
    ranked, count, mean, mean_of_squares = sorted_sums(halved)
    spread = count * (mean_of_squares - mean**2)
    inside = (1 - spread) / count
    tau = mean - np.sqrt(np.where(inside.real > 0, inside, 0))
    support = sum_of((ranked.real > tau.real).astype(int))
    excess = halved - np.take_along_axis(tau, support - 1, axis=-1)
    return np.where(excess.real > 0, excess, 0) ** 2


def entmax(logits, row, alpha=1.5):
    """[(α-1) s - τ]_+^(1/(α-1)), arXiv 1905.05702, by bisection for κ = (α-1) max s - τ and two Newton steps.

    κ is between 1, where the largest weight is 1, and n^(1-α), where it is 1/n. A complex step needs the last steps:
    they carry its imaginary part, exactly to first order.
    """
    if not logits.shape[-1]:
        return logits
    a = alpha - 1
    differences = logits - np.max(logits.real, axis=-1, keepdims=True)

    def powers(kappa, exponent):
        base = kappa + a * differences
        return np.where(base.real > 0, np.where(base.real > 0, base, 1) ** exponent, 0)

    large = np.ones((*logits.shape[:-1], 1))
    small = large * float(logits.shape[-1]) ** -np.real(a)
    for _ in range(100):
        middle = (large + small) / 2
        too_large = sum_of(powers(middle, 1 / a)).real >= 1
        large, small = np.where(too_large, middle, large), np.where(too_large, small, middle)
    kappa = (large + small) / 2
    for _ in range(2):
        kappa = kappa - (sum_of(powers(kappa, 1 / a)) - 1) / sum_of(powers(kappa, 1 / a - 1) / a)
    return powers(kappa, 1 / a)


def stieltjes(logits, row, q=2.0):
    """(λ - s)^-q with sum 1, by bisection for λ - max s in [1, n^(1/q)], and two Newton steps."""
    if not logits.shape[-1]:
        return logits
    differences = logits - np.max(logits.real, axis=-1, keepdims=True)
    large = np.ones((*logits.shape[:-1], 1))
    small = large * float(logits.shape[-1]) ** (1 / np.real(q))
    for _ in range(100):
        middle = (large + small) / 2
        too_large = sum_of((middle - differences) ** -q).real >= 1
        large, small = np.where(too_large, middle, large), np.where(too_large, small, middle)
    gap = (large + small) / 2
    for _ in range(2):
        gap = gap + (sum_of((gap - differences) ** -q) - 1) / sum_of(q * (gap - differences) ** (-q - 1))
    return (gap - differences) ** -q


def asentmax(logits, row, beta=1.0, gamma=1.0, delta=1.0):
    """arXiv 2506.16640, from secondary sources, with log(t + 2) for the query at t = n - 1."""
    return entmax15(logits * (delta + beta * np.log(row.n + 1) ** gamma), row)


def elastic(logits, row, tau=-1.0):
    """relu(a + τ/n), arXiv 2601.00919; not checked against it."""
    excess = softmax(logits) + tau / row.n
    return np.where(excess.real > 0, excess, 0)


def adaptive_temperature(logits, row):
    """arXiv 2410.01104, figure 5, as other implementations have it."""
    weights = softmax(logits)
    entropy = -sum_of(weights * np.log(weights))
    fit = -0.037 * entropy**4 + 0.481 * entropy**3 - 2.3 * entropy**2 + 4.917 * entropy - 1.791
    return softmax(np.where((entropy.real > 0.5) & (fit.real > 1), fit, 1) * logits)


def top_k(logits, row, k=64):
    """Softmax of the k largest, the rest at -inf; without ties. arXiv 1912.11637."""
    rank = np.argsort(np.argsort(-logits.real, axis=-1), axis=-1)
    kept = rank < k
    exponentials = np.where(
        kept, np.exp(logits - np.max(logits.real, axis=-1, keepdims=True, initial=-np.inf)), 0
    )
    return exponentials / sum_of(exponentials)


def stick_breaking(logits, row):
    """σ(s_j) Π_{k>j} (1 - σ(s_k)), arXiv 2410.17980, written out."""
    shares = 1 / (1 + np.exp(-logits))
    weights = np.zeros_like(shares)
    left = np.ones_like(shares[..., 0])
    for j in reversed(range(logits.shape[-1])):
        weights[..., j] = left * shares[..., j]
        left = left * (1 - shares[..., j])
    return weights


# Formula and the parameters that the tests try, by name.
SOLVER = {
    "sparsemax": (sparsemax, ({},)),
    "entmax15": (entmax15, ({},)),
    "entmax": (entmax, ({"alpha": (0.6, 1.9)}, {"alpha": 1.25}, {"alpha": 0.5}, {"alpha": np.array(1.7)})),
    "stieltjes": (stieltjes, ({}, {"q": (1.5, 6.0)})),
    "asentmax": (asentmax, ({}, {"beta": (0.1, 0.8), "gamma": np.array(-0.4), "delta": np.array(0.7)})),
    "elastic": (elastic, ({}, {"tau": (-1.5, -0.2)})),
    "adaptive_temperature": (adaptive_temperature, ({},)),
    "top_k": (top_k, ({"k": 4},)),
    "stick_breaking": (stick_breaking, ({},)),
}
