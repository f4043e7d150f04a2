"""Tables of the measurements, on heads with known answers; and what is refused."""

import dataclasses
import math

import numpy as np
import pytest

from attnorm import get_normalizer, theory
from attnorm.analysis import sources
from attnorm.analysis.selection import measure
from attnorm.analysis.selection.measure import Study
from attnorm.analysis.selection.options import Options, options_that_fit
from tests.analysis.selection.heads import Given

RULES = {name: get_normalizer(name) for name in ("softmax", "l2")}
SMALL = dict(lengths=(8, 16), num_selected=(1, 4), num_selected_by_length=2, max_rows=0)


def study(source, rules=RULES, **options):
    options = Options(**SMALL | options)
    return Study(source, source.example_tokens(options.lengths[-1], options.num_texts), rules, options)


def test_per_head_numbers_of_known_heads():
    source = sources.load("synthetic")
    table = {(row["normalizer"], row["head"]): row for row in measure.heads(study(source))}
    keys = np.arange(1, 17)
    uniform, sink = table["softmax", 0], table["softmax", 1]
    assert uniform["entropy"] == pytest.approx(np.log(keys).mean(), rel=1e-5)
    assert uniform["effective_keys"] == pytest.approx(keys.mean(), rel=1e-5)
    assert uniform["weight_norm"] == pytest.approx((keys**-0.5).mean(), rel=1e-5)
    assert uniform["sink_mass"] == pytest.approx((1 / keys).mean(), rel=1e-5)
    mass = math.exp(source.SINK) / (math.exp(source.SINK) + keys - 1)
    assert sink["sink_mass"] == pytest.approx(mass.mean(), rel=1e-5)
    for head in range(4):
        # L2 changes neither entropy nor effective keys of softmax's shares, makes all norms 1, and keeps
        # variance.
        assert table["l2", head]["weight_norm"] == pytest.approx(1, rel=1e-5)
        assert table["l2", head]["sink_mass"] == pytest.approx(table["softmax", head]["sink_mass"], rel=1e-5)
        assert table["l2", head]["output_variance"] > table["softmax", head]["output_variance"]
    assert {row["layer"] for row in table.values()} == {0}


@pytest.mark.parametrize(("short_rows", "rows"), [("dropped", range(3, 9)), ("kept", range(1, 9))])
def test_distance_of_identical_vectors(short_rows, rows):
    """Uniform causal rows of n keys, N = 2, x = 1: d̃ = E d̃ = (n - 2)(2 - 1) / n, and 0 for n <= 2."""
    source = Given(np.zeros((2, 8, 8)), np.ones((8, 1)), is_causal=True)
    table = measure.distance_by_length(
        study(source, {"softmax": RULES["softmax"]}, lengths=(8,), short_rows=short_rows)
    )
    wanted = np.mean([max(n - 2, 0) / n for n in rows])
    assert len(table) == 2
    for row in table:
        for key in ("distance", "expected", "bound", "expected_low", "expected_high"):
            # Sums of distances that are differences of equal numbers: the root of float32's precision.
            assert row[key] == pytest.approx(wanted, rel=5e-3), key


def test_critical_number_is_one_where_selection_changes_nothing_and_none_under_a_sink():
    """Twelve heads; identical vectors and weights, or a key that holds nearly all weight."""
    x = np.ones((16, 1))
    for extra, critical in ((0.0, {8: 1, 16: 1}), (8.0, {})):
        logits = np.zeros((12, 16, 16))
        logits[:, :, 3] = extra * (1 + np.arange(12)[:, None] / 100)
        source = Given(logits, x)
        table = measure.critical_num_selected(study(source, {"softmax": RULES["softmax"]}))
        found = {row["length"]: row["num_selected"] for row in table if row["is_critical"]}
        assert found == critical
        assert source.passes == 2  # one per length
        assert all((row["p_value"] < 0.01) == (row["statistic"] > 0.6) for row in table)


@pytest.mark.parametrize(("heads", "is_open"), [(4, True), (5, False)])
def test_critical_number_is_left_open_where_so_few_heads_can_reject_nothing(heads, is_open):
    """The smallest p-value is 2 / C(2 n, n): 1/35 for 4 heads, 1/126 for 5."""
    source = Given(np.zeros((heads, 8, 8)), np.ones((8, 1)))
    table = measure.critical_num_selected(study(source, {"softmax": RULES["softmax"]}, lengths=(8,)))
    assert [math.isnan(row["is_critical"]) for row in table] == [is_open] * len(table)


def separability_of_two_kinds_of_rows(**options):
    """Eight pairs of opposite unit vectors. 14 rows select four pairs, whose sum is 0; 2 rows one of each."""
    x = np.stack([np.eye(8), -np.eye(8)], axis=1).reshape(16, 8)
    logits = np.zeros((1, 16, 16))
    logits[:, :14, :8] = 1
    logits[:, 14:, ::2] = 1
    small = study(Given(logits, x), {"l2": RULES["l2"]}, lengths=(16,), num_selected=(8,), **options)
    (row,) = measure.separability(small)
    return row


def test_proved_upper_side_is_the_mean_tail_and_the_share_of_rows_beyond_the_threshold():
    row = separability_of_two_kinds_of_rows()
    top = np.full(8, np.e / np.sqrt(8 * np.e**2 + 8))
    floor = theory.proved_mean_distance_floor(top, radius=1.0, num_dims=8)
    # r is the outside weight 0.12 in the first kind, and above 0.9 in the second.
    best = theory.proved_separability_upper_bound(top, floor, radius=1.0, threshold=10**-0.5, exceeding=1 / 8)
    assert float(best) < 0.999
    assert row["high"] == pytest.approx(float(best), rel=1e-4)


def test_proved_upper_side_is_left_open_for_vectors_of_several_lengths():
    row = separability_of_two_kinds_of_rows(unit_vectors=False)
    assert math.isnan(row["high"]) and not math.isnan(row["low"])


def test_ratio_of_responses_is_that_of_a_head(monkeypatch):
    """Ratios 1/10, 1/2 and, of the head with the largest response, 4/5; a head that is flat has none."""
    spectral = np.array([10.0, 2.0, 5.0, 0.0])[:, None, None]
    response = np.array([1.0, 1.0, 4.0, 0.0])[:, None, None]
    rows = dict(spectral=spectral, mean_response=response, difference=response[..., None])
    monkeypatch.setattr(measure, "gradient_rows", lambda *_, **__: rows | dict(direction_keys=response))
    source = Given(np.zeros((4, 8, 8)), np.ones((8, 1)))
    one = dict(lengths=(8,), temperatures=(1.0,), steps=(1.0,), max_gradient_rows=1)
    (row,) = measure.gradients(study(source, {"l2": RULES["l2"]}, **one))
    assert (row["mean_response"], row["spectral"], row["response_ratio"]) == (4, 10, 0.5)
    spectral[:] = 0
    (row,) = measure.gradients(study(source, {"l2": RULES["l2"]}, **one))
    assert math.isnan(row["response_ratio"])


def test_every_layer_and_text_has_draws_of_its_own(monkeypatch):
    """Two equal layers on two equal texts; the same again with the same seed, and others with another."""

    class TwoLayers(Given):
        def layers(self, tokens):
            for attention in super().layers(tokens):
                yield from (attention, dataclasses.replace(attention, layer=1))

    asked = []
    zeros = {name: np.zeros((1, 8, 1)) for name in ("distance", "expected", "spectral", "mean_response")}
    zeros |= {"direction_keys": np.zeros((1, 8, 1))}
    monkeypatch.setattr(measure, "random_ranks", lambda counted, num_draws, seed: asked.append(seed))
    monkeypatch.setattr(measure, "distance_rows", lambda *_, **__: zeros)
    monkeypatch.setattr(
        measure,
        "gradient_rows",
        lambda *_, seed, **__: asked.append(seed) or zeros | {"difference": np.zeros((1, 8, 1, 1))},
    )
    source = TwoLayers(np.zeros((1, 8, 8)), np.ones((8, 1)))
    small = dict(lengths=(8,), num_selected=(1,), temperatures=(1.0,), steps=(1.0,), num_texts=2)
    seeds = []
    for seed in (0, 0, 1):
        for measurement in (measure.distance_by_num_selected, measure.gradients):
            measurement(study(source, {"l2": RULES["l2"]}, seed=seed, **small))
            seeds.append(tuple(asked))
            del asked[:]
    assert len(set(seeds[0])) == 4 and seeds[0] == seeds[1] == seeds[2] == seeds[3]
    assert seeds[4] == seeds[5] and not set(seeds[4]) & set(seeds[0])


def test_texts_and_lengths_that_do_not_fit_are_refused():
    source = Given(np.zeros((1, 8, 8)), np.ones((8, 1)))
    with pytest.raises(ValueError, match=r"^lengths must be at most 8, what given can read, got 16"):
        Study(source, np.zeros((1, 16), int), RULES, Options(**SMALL))
    with pytest.raises(ValueError, match=r"^texts must have shape \(2, 8\), got \(1, 8\)"):
        Study(source, np.zeros((1, 8), int), RULES, Options(**SMALL | dict(lengths=(8,), num_texts=2)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_selected=(1, 64), lengths=(64,)), "num_selected must be below the largest length, L = 64"),
        (dict(num_selected_by_length=40), "lengths must be above N = 40"),
        (dict(num_selected=(0, 1)), "num_selected must be at least 1, got 0"),
        (dict(lengths=()), "lengths must be at least one number"),
        (dict(temperatures=(0.1, 0.0)), "temperatures must be positive and finite, got 0.0"),
        (dict(temperatures=(math.inf,)), "temperatures must be positive and finite, got inf"),
        (dict(steps=(-1.0,)), "steps must be positive and finite, got -1.0"),
        (dict(temperatures=(1e-300,)), "temperatures must be from 1e-30 to 1e30, got 1e-300"),
        (dict(seed=2**32), r"seed must be below 2\^32, got 4294967296"),
        (dict(level=1.0), "level must be between 0 and 1, got 1.0"),
        (dict(max_critical_fraction=0), "max_critical_fraction must be above 0 and at most 1, got 0"),
        (dict(vectors="keys"), "vectors must be one of"),
        (dict(aggregate="sum"), "aggregate must be one of"),
        (dict(num_draws=0), "num_draws must be at least 1, got 0"),
    ],
)
def test_options_outside_their_range_are_named(options, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        Options(**options)


def test_numbers_that_are_not_whole_are_named():
    with pytest.raises(TypeError, match="^num_texts must be a whole number, got 1.5"):
        Options(num_texts=1.5)


def test_default_options_fit_every_model():
    for max_length in (2, 7, 33, 512, 100_000):
        options = options_that_fit(max_length)
        assert options.lengths[-1] == (
            max_length if max_length < 32 else min(1024, 2 ** (max_length.bit_length() - 1))
        )
        assert options.num_selected[-1] < options.lengths[-1]


def test_default_numbers_fit_the_lengths_that_are_given():
    options = options_that_fit(1024, lengths=(64, 32))
    assert (options.lengths, options.num_selected) == ((32, 64), (1, 5, 10, 20))
    assert options_that_fit(1024, lengths=(4, 8)).num_selected_by_length == 3
    with pytest.raises(ValueError, match="^lengths must be at least 1, got 0"):
        options_that_fit(1024, lengths=(0,))


def test_negative_weights_are_measured_and_their_bounds_left_open():
    rng = np.random.default_rng(0)
    source = Given(rng.normal(size=(2, 8, 8)) * 3, rng.normal(size=(8, 2)))
    rules = {"gelu_l2": get_normalizer("gelu_l2")}
    table = measure.distance_by_num_selected(study(source, rules, lengths=(8,), num_draws=400))
    assert all(math.isnan(row["bound"]) and row["distance"] > 0 for row in table)
    assert all(row["expected"] <= 1.02 * row["expected_high"] for row in table)


@pytest.mark.slow
@pytest.mark.parametrize("name", ("sparsemax", "stick_breaking", "softpick"))
def test_normalizers_of_every_kind_can_be_measured(name):
    """Sparse, by cumulative products, and without a common sum."""
    rng = np.random.default_rng(0)
    source = Given(rng.normal(size=(2, 8, 8)), rng.normal(size=(8, 2)), is_causal=True)
    small = study(
        source, {name: get_normalizer(name)}, lengths=(8,), temperatures=(1.0,), steps=(1e-3,), max_rows=3
    )
    for row in [*measure.heads(small), *measure.gradients(small), *measure.distance_by_length(small)]:
        open_bounds = {"bound", "proved_bound", "spectral_bound"}
        unknown = [key for key, value in row.items() if isinstance(value, float) and not math.isfinite(value)]
        assert set(unknown) <= open_bounds, unknown
