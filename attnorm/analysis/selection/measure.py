"""The measurements of one model on one text, as tables: a row per head, or per point of a figure."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.stats import ks_2samp

from attnorm import theory
from attnorm.analysis.selection.gradients import gradient_rows
from attnorm.analysis.selection.options import Options
from attnorm.analysis.selection.rows import (
    distance_rows,
    evenly_spaced,
    random_ranks,
    row_weights,
    rows_of,
    separability_rows,
    vectors_of,
)
from attnorm.analysis.sources import Attention, Source, attentions
from attnorm.normalizers import Normalizer
from attnorm.normalizers.lp import LInf, Lp

_BOUNDS = ("bound", "expected_low", "expected_high", "expected_ceiling")
_NUM_CRITICAL = 16
_THRESHOLDS = 10 ** np.linspace(-4, 1, 11)  # of Theorem 2, in units of the radius


@dataclasses.dataclass(frozen=True)
class Study:
    """What is measured on what.

    Args:
      source: of :func:`attnorm.analysis.sources.load`.
      texts: token ids, one row per text; shorter lengths take the beginning of each.
      normalizers: by the name that stands in tables.
      options: see there; ``num_texts`` rows and the largest of ``lengths`` columns are wanted of the texts.
      tick: called after each pass of the model over one text.

    Raises:
      ValueError: a length that the model cannot read, or texts of another shape.
    """

    source: Source
    texts: Int[np.ndarray, "M T"]
    normalizers: Mapping[str, Normalizer]
    options: Options
    tick: Callable[[], None] = lambda: None

    def __post_init__(self):
        longest = self.options.lengths[-1]
        if longest > self.source.max_length:
            raise ValueError(
                f"lengths must be at most {self.source.max_length}, what {self.source.name} can read, "
                f"got {longest}"
            )
        wanted = (self.options.num_texts, longest)
        if np.shape(self.texts) != wanted:
            raise ValueError(f"texts must have shape {wanted}, got {np.shape(self.texts)}")

    def over_layers(self, length: int, measure: Callable[[Attention, int], Mapping[str, dict]]) -> dict:
        """``measure``, a result per normaliser, on every layer and text; by (normaliser, layer).

        It is given the attention and a seed of its own, so that no two layers or texts share their luck.

        Results are arrays (N, R, ...); the rows of the next text go behind those of the one before.
        """
        found: dict = {}
        for number, text in enumerate(self.texts):
            for attention in attentions(self.source, text[:length]):
                seed = _own_seed(self.options.seed, number, attention.layer)
                for name, result in measure(attention, seed).items():
                    result = {key: np.asarray(value) for key, value in result.items()}
                    found.setdefault((name, attention.layer), []).append(result)
            self.tick()
        return {
            key: {name: np.concatenate([result[name] for result in results], axis=1) for name in results[0]}
            for key, results in found.items()
        }

    def num_rows(self, length: int) -> Int[np.ndarray, "R"]:
        """How many keys each of the measured rows counts, over all texts."""
        rows = evenly_spaced(length, self.options.max_rows)
        all_keys = not self.source.is_causal or self.options.hidden == "counted"
        return np.tile(np.full_like(rows, length) if all_keys else rows + 1, self.options.num_texts)


def distance_by_length(study: Study) -> list[dict]:
    """Figure 2a: d̃, its bound and the expectation of random selections, per head, at every length."""
    return [
        row
        for length in study.options.lengths
        for row in _distances(study, length, (study.options.num_selected_by_length,))
    ]


def distance_by_num_selected(study: Study) -> list[dict]:
    """Figure 2b: the same at the largest length, for every N."""
    return _distances(study, study.options.lengths[-1], study.options.num_selected)


def _distances(study, length, nums):
    # Nothing is proved here about the norm of the sum.
    with_bounds = study.options.aggregate == "norms"
    found = study.over_layers(
        length, lambda attention, seed: _distance_rows(study, attention, seed, nums, with_bounds)
    )
    table = []
    for (normalizer, layer), result in found.items():
        means = {name: _row_means(study, length, values, nums) for name, values in result.items()}
        for head in range(means["distance"].shape[0]):
            for k, N in enumerate(nums):
                table.append(
                    {
                        "normalizer": normalizer,
                        "length": length,
                        "num_selected": N,
                        "layer": layer,
                        "head": head,
                        **{name: _short(means[name][head, k]) for name in sorted(means)},
                        **({} if with_bounds else dict.fromkeys(_BOUNDS, math.nan)),
                    }
                )
    return table


def critical_num_selected(study: Study) -> list[dict]:
    """Figure 2c: at which N true and expected distances of the heads can no longer be told apart."""
    table = []
    for length in study.options.lengths:
        most = max(min(int(study.options.max_critical_fraction * length), length - 1), 1)
        nums = tuple(sorted({round(N) for N in np.geomspace(1, most, _NUM_CRITICAL)}))

        def measure(attention, seed, nums=nums):
            return _distance_rows(study, attention, seed, nums, False)

        found = study.over_layers(length, measure)
        for normalizer in study.normalizers:
            true, expected = (
                np.concatenate(
                    [
                        _row_means(study, length, result[name], nums)
                        for (other, _), result in found.items()
                        if other == normalizer
                    ]
                )
                for name in ("distance", "expected")
            )
            tests = [ks_2samp(true[:, k], expected[:, k]) for k in range(len(nums))]
            inseparable = [test.pvalue >= study.options.level for test in tests]
            critical = nums[inseparable.index(True)] if any(inseparable) else None
            # With few heads, not even samples that do not overlap can be told apart.
            is_open = 2 / math.comb(2 * len(true), len(true)) >= study.options.level
            for k, N in enumerate(nums):
                table.append(
                    {
                        "normalizer": normalizer,
                        "length": length,
                        "num_selected": N,
                        "distance": _short(true[:, k].mean()),
                        "expected": _short(expected[:, k].mean()),
                        "statistic": _short(tests[k].statistic),
                        "p_value": _short(tests[k].pvalue),
                        "is_critical": math.nan if is_open else int(N == critical),
                    }
                )
    return table


def _distance_rows(study, attention, seed, nums, with_bounds):
    options = study.options
    rows = rows_of(
        attention,
        vectors_of(attention, options.vectors, options.unit_vectors),
        options.max_rows,
        options.hidden,
    )
    ranks = random_ranks(rows.counted, options.num_draws, seed)
    return {
        name: distance_rows(
            normalizer,
            rows,
            ranks,
            num_selected=nums,
            aggregate=options.aggregate,
            with_bounds=with_bounds,
        )
        for name, normalizer in study.normalizers.items()
    }


def separability(study: Study) -> list[dict]:
    """Figure 3: ``N_s / N`` with Theorem 2's bounds, and precision, recall and F in value space, per head."""
    options, length = study.options, study.options.lengths[-1]
    nums = options.num_selected

    def measure(attention, _):
        x = vectors_of(attention, options.vectors, options.unit_vectors)
        rows = rows_of(attention, x, options.max_rows, options.hidden)
        values = vectors_of(attention, "values", unit=False)
        value_rows = rows_of(attention, values, options.max_rows, options.hidden)
        results = {}
        for name, normalizer in study.normalizers.items():
            of_x, of_values = (
                separability_rows(
                    normalizer,
                    of,
                    *_sphere(of.gram),
                    jnp.asarray(_THRESHOLDS, jnp.float32) * _sphere(of.gram)[0],
                    num_selected=nums,
                    num_dims=vectors.shape[-1],
                    with_bounds=with_bounds,
                )
                for of, vectors, with_bounds in ((rows, x, True), (value_rows, values, False))
            )
            results[name] = of_x | {f"value_{key}": value for key, value in of_values.items()}
        return results

    table = []
    for (normalizer, layer), result in study.over_layers(length, measure).items():
        means = {name: _row_means(study, length, values, nums) for name, values in result.items()}
        # The bound holds at every threshold; the best is the one to state. It is about x of one length.
        high = np.minimum(means["high"].min(-1), 1)
        means["high"] = high if options.unit_vectors else np.full_like(high, np.nan)
        for head in range(means["recall"].shape[0]):
            for k, N in enumerate(nums):
                table.append(
                    {
                        "normalizer": normalizer,
                        "length": length,
                        "num_selected": N,
                        "layer": layer,
                        "head": head,
                        **{name: _short(means[name][head, k]) for name in sorted(means)},
                    }
                )
    return table


def gradients(study: Study) -> list[dict]:
    """Figure 4: g(T, ε) and the norms of the Jacobian against the temperature, extremes over heads."""
    options, length = study.options, study.options.lengths[-1]

    def measure(attention, seed):
        chosen = evenly_spaced(length, options.max_gradient_rows)
        visible = (
            jnp.arange(length) <= chosen[:, None]
            if attention.is_causal
            else jnp.ones((len(chosen), length), bool)
        )
        logits = attention.logits[:, chosen]
        return {
            name: gradient_rows(
                normalizer,
                logits / attention.scale if options.gradient_logits == "raw" else logits,
                visible,
                jnp.asarray(chosen),
                temperatures=options.temperatures,
                steps=options.steps,
                seed=seed,
            )
            for name, normalizer in study.normalizers.items()
        }

    found = study.over_layers(length, measure)
    table = []
    for normalizer, rule in study.normalizers.items():
        heads = [result for (name, _), result in found.items() if name == normalizer]
        of_heads = {key: np.concatenate([result[key] for result in heads]) for key in heads[0]}
        p = _power(rule)
        for q, temperature in enumerate(options.temperatures):
            spectral, responses = (of_heads[key][:, :, q].mean(1) for key in ("spectral", "mean_response"))
            ratios = responses[spectral > 0] / spectral[spectral > 0]
            for e, step in enumerate(options.steps):
                difference = of_heads["difference"][:, :, q, e]
                bounds: dict[str, float | Array] = {"proved_bound": math.nan, "spectral_bound": math.nan}
                if p is not None:
                    bounds["proved_bound"] = theory.proved_finite_difference_bound(
                        length, p=p, temperature=temperature, step=step
                    )
                    bounds["spectral_bound"] = theory.proved_spectral_bound(
                        length, p=p, temperature=temperature
                    )
                table.append(
                    {
                        "normalizer": normalizer,
                        "temperature": _short(temperature),
                        "step": _short(step),
                        "difference": _short(difference.mean(1).max()),
                        "difference_median": _short(np.median(difference.mean(1))),
                        "difference_largest": _short(difference.max()),
                        "mean_response": _short(responses.max()),
                        "response_ratio": _short(np.median(ratios)) if len(ratios) else math.nan,
                        "spectral": _short(spectral.max()),
                        "spectral_largest": _short(of_heads["spectral"][:, :, q].max()),
                        "direction_keys": _short(np.median(of_heads["direction_keys"][:, :, q])),
                        "paper_bound": _short(theory.paper_gradient_bound(temperature)),
                        **{name: _short(bound) for name, bound in bounds.items()},
                    }
                )
    return table


def heads(study: Study) -> list[dict]:
    """Entropy, effective keys, sink mass, weight norm and output variance, per head; means over rows."""
    options, length = study.options, study.options.lengths[-1]

    def measure(attention, _):
        rows = rows_of(attention, jnp.zeros((1, length, 1)), options.max_rows, options.hidden)
        return {
            name: _head_rows(normalizer, rows, attention.values)
            for name, normalizer in study.normalizers.items()
        }

    return [
        {
            "normalizer": normalizer,
            "length": length,
            "layer": layer,
            "head": head,
            **{name: _short(values[head].mean()) for name, values in result.items()},
        }
        for (normalizer, layer), result in study.over_layers(length, measure).items()
        for head in range(result["entropy"].shape[0])
    ]


@jax.jit
def _head_rows(normalizer, rows, values):
    weights = row_weights(normalizer, rows).astype(jnp.float32)
    total = jnp.sum(weights, -1, keepdims=True)
    shares = weights / jnp.where(total != 0, total, 1)
    visible_values = jnp.where(rows.visible, jnp.var(values, axis=-1)[:, None], 0)
    return {
        "entropy": theory.entropy(shares),
        "effective_keys": theory.effective_keys(weights),
        "sink_mass": shares[..., 0],
        "weight_norm": jnp.linalg.norm(weights, axis=-1),
        "output_variance": jnp.var(jnp.einsum("NRS,NSH->NRH", weights, values, precision="highest"), axis=-1),
        "value_variance": jnp.sum(visible_values, -1) / jnp.sum(rows.visible, -1),
    }


def _row_means(study, length, values: Float[np.ndarray, "N R K ..."], nums: Sequence[int]):
    """Means over the rows that count for each N."""
    if study.options.short_rows == "kept":
        return values.mean(1)
    counts = study.num_rows(length)
    return np.stack([values[:, counts > N, k].mean(1) for k, N in enumerate(nums)], axis=1)


def _sphere(gram):
    """The largest norm, and the smallest distance between two vectors, over all heads."""
    squares = jnp.diagonal(gram, axis1=-2, axis2=-1)
    pairs = squares[:, :, None] + squares[:, None] - 2 * gram + jnp.where(jnp.eye(gram.shape[-1]), jnp.inf, 0)
    return jnp.sqrt(jnp.max(squares)), jnp.sqrt(jnp.maximum(jnp.min(pairs), 0))


def _own_seed(seed: int, text: int, layer: int) -> int:
    """Of one layer on one text."""
    return int(np.random.SeedSequence((seed, text, layer)).generate_state(1)[0])


def _power(rule: Normalizer) -> float | None:
    """p of an L_p normaliser, None for others: nothing is proved here about their gradients."""
    if isinstance(rule, LInf):
        return math.inf
    return float(rule.p) if isinstance(rule, Lp) else None


def _short(value) -> float:
    """Six digits are more than any of these means has."""
    return float(f"{float(value):.6g}")
