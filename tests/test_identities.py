"""The identities that the package rests on, each in float64 to 1e-12 (1 + max|s|)."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from tests.checks import double_precision

POWERS = [0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 6.0, 32.0]
every_power = pytest.mark.parametrize("p", POWERS)
every_power_and_infinity = pytest.mark.parametrize("p", [*POWERS, math.inf])


def rows(seed=0, count=5, keys=13):
    """Logits of several sizes, one of them with equal entries."""
    logits = np.random.default_rng(seed).normal(size=(count, keys)) * np.array([[0.1], [1], [5], [30], [0]])
    return logits + np.arange(count)[:, None]


def weights(logits, p):
    with double_precision():
        return np.asarray(attnorm.lp(jnp.asarray(logits), p=p))


def jacobian(logits, p):
    """d y_j / d s_k of one row."""
    with double_precision():
        return np.asarray(jax.jacfwd(functools.partial(attnorm.lp, p=p))(jnp.asarray(logits)))


def logsumexp(logits):
    largest = logits.max(-1, keepdims=True)
    return (largest + np.log(np.exp(logits - largest).sum(-1, keepdims=True)))[..., 0]


def softmax(logits):
    return np.exp(logits - logsumexp(logits)[..., None])


def shannon(logits):
    """Entropy of softmax(logits)."""
    return logsumexp(logits) - (softmax(logits) * logits).sum(-1)


def assert_identical(got, expected, logits, relative_to=1.0):
    """To 1e-12 (1 + max|s|) of the size given."""
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-12 * (1 + np.abs(logits).max()) * relative_to)


@every_power
def test_weights_are_softmax_times_a_power_of_its_renyi_entropy(p):
    s = rows()
    a = softmax(s)
    renyi = shannon(s) if p == 1 else (logsumexp(p * s) - p * logsumexp(s)) / (1 - p)
    factor = np.exp((1 - 1 / p) * renyi)
    assert_identical(weights(s, p), a * factor[:, None], s)
    if p == 2:
        assert_identical(factor**2, 1 / (a**2).sum(-1), s, 13)


def test_infinity_is_softmax_over_its_largest_weight():
    s = rows()
    a = softmax(s)
    assert_identical(weights(s, math.inf), a / a.max(-1, keepdims=True), s)
    assert_identical(weights(s, math.inf), np.exp(s - s.max(-1, keepdims=True)), s)
    assert (weights(s, math.inf).max(-1) == 1).all()


@every_power
def test_output_is_that_of_softmax_times_one_number_per_row(p):
    rng = np.random.default_rng(1)
    query, key, value = rng.normal(size=(3, 1, 20, 2, 8))
    query = 6 * query
    logits = np.einsum("btnh,bsnh->btns", query, key) / np.sqrt(8)
    with double_precision():
        attend = functools.partial(attnorm.dot_product_attention, implementation="chunked")
        softmax_output = np.asarray(attend(query, key, value, normalizer="softmax"))
        output = np.asarray(attend(query, key, value, normalizer=attnorm.get_normalizer("lp", p=p)))
    factor = np.exp(logsumexp(logits) - logsumexp(p * logits) / p)
    assert_identical(output, softmax_output * factor[..., None], logits, np.abs(value).max())


@every_power_and_infinity
def test_norm_of_an_output_hides_the_power(p):
    """Per-head RMSNorm without gain, its eps far below the variance, undoes the one number per row."""
    rng = np.random.default_rng(2)
    query, key, value = rng.normal(size=(3, 1, 20, 2, 8))

    def normalized(normalizer):
        with double_precision():
            output = attnorm.dot_product_attention(
                query, key, value, normalizer=normalizer, is_causal=True, implementation="chunked"
            )
        output = np.asarray(output)
        return output / np.sqrt((output**2).mean(-1, keepdims=True))

    assert_identical(normalized(attnorm.get_normalizer("lp", p=p)), normalized("softmax"), np.ones(1))


@pytest.mark.parametrize("keys, expected", [(2048, 0.990), (32768, 0.868)])
def test_layer_norm_with_its_usual_eps_damps_long_softmax_rows(keys, expected):
    """Uniform attention over N keys has variance 1/N, and eps = 1e-5 is no longer far below."""
    value = np.random.default_rng(3).normal(size=(keys, 400))
    a = weights(np.zeros((1, keys)), 1.0)
    variance = ((a @ value) ** 2).mean()
    damping = np.sqrt(variance / (variance + 1e-5))
    predicted = np.sqrt(1 / (1 + keys * 1e-5))
    np.testing.assert_allclose(predicted, expected, atol=1e-3)
    np.testing.assert_allclose(damping, predicted, atol=0.02)


@every_power
def test_jacobian(p):
    for s in rows():
        y = weights(s, p)
        assert_identical(jacobian(s, p), np.diag(y) - np.outer(y, y**p), s)


def test_jacobian_at_infinity_goes_to_the_largest_logit():
    for s in rows():
        y = weights(s, math.inf)
        ties = (s == s.max()) / (s == s.max()).sum()
        assert_identical(jacobian(s, math.inf), np.diag(y) - np.outer(y, ties), s)


@every_power
def test_vector_jacobian_product(p):
    g = np.random.default_rng(4).normal(size=(5, 13))
    s = rows()
    y = weights(s, p)
    with double_precision():
        _, pullback = jax.vjp(functools.partial(attnorm.lp, p=p), jnp.asarray(s))
        (got,) = pullback(jnp.asarray(g))
    assert_identical(got, y * g - y**p * (y * g).sum(-1, keepdims=True), s, max(1, y.max()))


@every_power
def test_frobenius_norm_of_the_jacobian(p):
    for s in rows():
        y = weights(s, p)
        squared = (jacobian(s, p) ** 2).sum()

        def moment(k, y=y):
            return (y**k).sum()

        assert_identical(squared, moment(2) * (1 + moment(2 * p)) - 2 * moment(p + 2), s)
        if p == 1:
            assert_identical(squared, moment(2) + moment(2) ** 2 - 2 * moment(3), s)
        if p == 2:
            assert_identical(squared, 1 - moment(4), s)


@every_power_and_infinity
@pytest.mark.parametrize("keys", [1, 2, 100])
def test_only_p_2_makes_the_l2_norm_of_uniform_weights_one(p, keys):
    y = weights(np.full((1, keys), 3.0), p)
    norm = np.sqrt((y**2).sum())
    expected = keys ** (0.5 - 1 / p)
    np.testing.assert_allclose(norm, expected, rtol=1e-12)
    if keys > 1:
        assert (abs(norm - 1) < 1e-12) == (p == 2)


@every_power
def test_derivative_of_the_weights_by_the_power(p):
    s = rows()
    with double_precision():
        log_slope = np.asarray(jax.jacfwd(lambda p: jnp.log(attnorm.lp(jnp.asarray(s), p=p)))(jnp.asarray(p)))
    expected = shannon(p * s) / p**2
    assert_identical(log_slope, np.broadcast_to(expected[:, None], s.shape), p * s, 1 / p**2)


@every_power
@pytest.mark.parametrize("implementation", ["reference", "chunked"])
def test_derivative_of_a_loss_by_the_power(p, implementation):
    """dL/dp = sum over rows of (<out, dout> - dlog_norm) H(softmax(p s)) / p^2."""
    rng = np.random.default_rng(5)
    query, key, value = rng.normal(size=(3, 1, 20, 2, 8))
    d_output, d_log_norm = rng.normal(size=(1, 20, 2, 8)), rng.normal(size=(1, 20, 2))
    logits = np.einsum("btnh,bsnh->btns", query, key) / np.sqrt(8)

    def attend(p):
        rule = attnorm.get_normalizer("lp", p=p)
        return attnorm.dot_product_attention(
            query, key, value, normalizer=rule, implementation=implementation, return_log_norm=True
        )

    with double_precision():
        (output, log_norm), pullback = jax.vjp(attend, jnp.full(2, p))
        (slope,) = pullback((jnp.asarray(d_output), jnp.asarray(d_log_norm)))
    output, log_norm, slope = (np.asarray(x) for x in (output, log_norm, slope))
    through = (output * d_output).sum(-1) - d_log_norm
    entropy = shannon(p * logits)
    assert_identical(slope, (through * entropy / p**2).sum((0, 1)), p * logits, np.abs(through).sum() / p**2)
    # The same by tiles, without another residual.
    w = np.exp(p * (logits - log_norm[..., None]))
    by_tiles = -(through * (w * (logits - log_norm[..., None])).sum(-1) / p).sum((0, 1))
    assert_identical(by_tiles, slope, p * logits, np.abs(through).sum() / p**2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
@every_power_and_infinity
def test_bound_of_the_spectral_norm_of_the_jacobian(p, temperature):
    """2^(-1/p) / T for 1 <= p <= 2 at every length; 1/2 T for softmax, 1/sqrt(2) T for L2; larger p grow with L."""
    keys = 9
    rng = np.random.default_rng(6)
    worst_logits = np.full(keys, -60.0)
    worst_logits[:2] = 0  # two equal weights attain the supremum up to p = 2
    candidates = [
        *(rng.normal(size=(20, keys)) * rng.choice([0.3, 1, 5], (20, 1))),
        worst_logits,
        np.zeros(keys),
    ]
    norms = []
    for s in candidates:
        with double_precision():
            full = jax.jacfwd(lambda s: attnorm.lp(s / temperature, p=p))(jnp.asarray(s * temperature))
        norms.append(np.linalg.norm(full, 2))
    if 1 <= p <= 2:
        supremum = 2 ** (-1 / p) / temperature
        assert max(norms) <= supremum * (1 + 1e-12)
        np.testing.assert_allclose(norms[-2], supremum, rtol=1e-12)
    elif p == math.inf:
        # Uniform weights but for one logit a little above: y = 1 everywhere, and J = I - 1 e_k^T.
        almost = np.zeros(keys)
        almost[0] = 1e-9
        norm = np.linalg.norm(jacobian(almost, p), 2)
        np.testing.assert_allclose(norm, np.sqrt(keys), rtol=1e-6)
        assert max(norms) <= norm / temperature * (1 + 1e-6)
    elif p > 2:
        # Long rows go beyond what two keys give, as keys^(1/2 - 1/p).
        few, many = (_norm_with_one_above(p, keys) for keys in (100, 10000))
        np.testing.assert_allclose(many / few, 100 ** (0.5 - 1 / p), rtol=0.25)


def _norm_with_one_above(p, keys):
    """The largest spectral norm over rows of one logit above keys - 1 equal ones, from 2 x 2 blocks."""
    largest = 0.0
    for above in np.linspace(0, 2 * np.log(keys) / p, 200):
        s = np.zeros(keys)
        s[0] = above
        y = weights(s, p)
        u, w = y, y**p
        # J = diag(y) - u w^T maps the span of e_0 and the constant vector on the rest into itself.
        root = np.sqrt(keys - 1)
        small = np.diag([y[0], y[1]]) - np.outer([u[0], root * u[1]], [w[0], root * w[1]])
        largest = max(largest, np.linalg.norm(small, 2))
    return largest


@pytest.mark.parametrize("name", ["softmax", "l2", "lp", "linf", "sink", "softmax_plus_n"])
def test_shift_permutation_and_masking(name):
    s = rows()
    order, kept = np.random.default_rng(7).permutation(13), np.arange(13) % 3 != 0
    rule = attnorm.get_normalizer(name, **({"p": jnp.array(1.5)} if name == "lp" else {}))

    def of(logits, where=None):
        with double_precision():
            return np.asarray(rule.weights(jnp.asarray(logits), where=where))

    if name not in ("sink", "softmax_plus_n"):  # these compare with a constant
        assert_identical(of(s + 17.0), of(s), s + 17)
    assert_identical(of(s[:, order]), of(s)[:, order], s)
    assert_identical(of(s, where=kept)[:, kept], of(s[:, kept]), s)


@pytest.mark.parametrize("temperature", [0.7, 2.0])
@every_power
def test_weak_bounds(p, temperature):
    """N^(-1/p) exp(-2 a/T) <= y <= N^(-1/p) exp(2 a/T) for logits in [-a, a], attained at the corners."""
    keys, a = 50, 1.5
    rng = np.random.default_rng(8)
    s = rng.uniform(-a, a, (30, keys))
    s[0], s[0, 0] = a, -a
    s[1], s[1, 0] = -a, a
    y = weights(s / temperature, p)
    middle, ratio = keys ** (-1 / p), np.exp(2 * a / temperature)
    assert (y >= middle / ratio * (1 - 1e-12)).all() and (y <= middle * ratio * (1 + 1e-12)).all()


def test_variance_of_the_output():
    """Uncorrelated values of unit variance: sum of the squared weights, 1 for L2 whatever the row."""
    s = rows()
    value = np.random.default_rng(9).normal(size=(13, 200_000))
    for p in (1.0, 2.0, 4.0):
        y = weights(s, p)
        np.testing.assert_allclose((y @ value).var(-1), (y**2).sum(-1), rtol=0.02)
    np.testing.assert_allclose((weights(s, 2.0) ** 2).sum(-1), 1, rtol=1e-13)


def test_correlated_values_make_the_l2_output_grow():
    """With correlation r the RMS over uniform rows is sqrt(1 - r + r N); softmax saturates at sqrt(r)."""
    for keys, correlation, expected in ((32768, 0.01, 18.1), (32768, 0.1, 57.3), (32768, 0.5, 128.0)):
        covariance_sum = keys * (1 - correlation) + keys**2 * correlation  # of 1^T C 1
        l2, one = (weights(np.zeros((1, keys)), p)[0, 0] for p in (2.0, 1.0))
        np.testing.assert_allclose(l2 * np.sqrt(covariance_sum), expected, rtol=2e-3)
        np.testing.assert_allclose(one * np.sqrt(covariance_sum), np.sqrt(correlation), rtol=2e-3)


def test_large_powers_keep_float32_accuracy():
    """w = exp(p (s - m)) / l, not exp(p (s - log norm)), which would lose p |s| eps = 3.5e-4 here."""
    s = np.asarray(1000 + np.random.default_rng(10).normal(size=50) * 0.02, np.float32)
    p = 64.0
    exact = jacobian(s.astype(np.float64), p)
    got = jax.jacrev(functools.partial(attnorm.lp, p=p))(s)
    assert np.abs(got - exact).max() < 2e-5 * np.abs(exact).max()
