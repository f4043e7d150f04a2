"""The GPU kernels, in an interpreter that simulates warpgroups, barriers and copies on a CPU; and what they refuse.

The interpreter comes with JAX 0.12. On older JAX the kernels refuse every call, which is tested too.
"""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import attnorm
from attnorm import _compat, attention, kernels
from attnorm.kernels import gpu
from tests.contract import cases, test_grid
from tests.contract.cases import Case
from tests.contract.helpers import make_arrays
from tests.kernels.features import FUSED

INTERPRET = kernels.Config(interpret=True)
INTERPRETED = pytest.mark.skipif(not _compat.HAS_MOSAIC_GPU, reason="the interpreter comes with JAX 0.12")
OTHERS = {"NVIDIA A100": "8.0", "NVIDIA L4": "8.9", "Tesla T4": "7.5", "NVIDIA B200": "10.0"}


def narrow(H=16, dtype=jnp.bfloat16):
    return jnp.ones((1, 8, 2, H), dtype)


def refusal(query, **options):
    with pytest.raises(NotImplementedError) as error:
        attnorm.dot_product_attention(query, query, query, implementation="pallas_gpu", **options)
    return str(error.value)


def test_old_jax_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr(_compat, "HAS_MOSAIC_GPU", False)
    with kernels.config(INTERPRET):
        assert f"JAX 0.12 or newer, this is {jax.__version__}" in refusal(narrow())


def test_the_version_decides():
    with kernels.config(INTERPRET):
        reason = gpu.supports(narrow(), None, None)
    assert (reason is None) == (jax.__version_info__ >= (0, 12))


def test_what_it_lacks_is_refused_by_name():
    assert "dtype float32" in refusal(narrow(dtype=jnp.float32))
    assert "head dim 264" in refusal(narrow(H=264))
    assert "dropout" in refusal(narrow(), dropout_rate=0.1, dropout_rng=jax.random.key(0))
    assert "precision" in refusal(narrow(), precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    assert "needs count, map" in refusal(narrow(), normalizer="ssmax")


@INTERPRETED
def test_the_card_decides(monkeypatch):
    assert "Hopper generation, this is cpu" in refusal(narrow())
    card = SimpleNamespace(device_kind="NVIDIA H200", compute_capability="9.0")
    monkeypatch.setattr(gpu, "_device", lambda: card)
    assert gpu.supports(narrow(), None, None) is None
    for version, reason in (("12080", "CUDA 12080"), ("12091", "None"), ("13000", "None")):
        card.client = SimpleNamespace(platform_version=f"PJRT C API\ncuda {version}")
        assert str(gpu.supports(narrow(), None, None)).startswith(reason)
    for kind, capability in OTHERS.items():
        card = SimpleNamespace(device_kind=kind, compute_capability=capability)
        monkeypatch.setattr(gpu, "_device", lambda card=card: card)
        assert kind in gpu.supports(narrow(), None, None)
    # Ahead of time a card has no capability, only a name.
    for kind, reason in (("NVIDIA GH200 480GB", None), ("NVIDIA A100", "it needs an NVIDIA GPU")):
        card = SimpleNamespace(device_kind=kind)
        monkeypatch.setattr(gpu, "_device", lambda card=card: card)
        assert str(gpu.supports(narrow(), None, None)).startswith(str(reason))


def test_a_gpu_prefers_its_kernels_and_falls_back_with_a_reason(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    attention._log_once.cache_clear()
    arrays = make_arrays(B=1, T=8, S=8)
    with caplog.at_level(logging.DEBUG, "attnorm.attention"):
        got = attnorm.dot_product_attention(*arrays)
    np.testing.assert_array_equal(got, attnorm.dot_product_attention(*arrays, implementation="chunked"))
    assert "pallas_gpu: dtype float32" in caplog.text and "by chunked" in caplog.text
    if _compat.HAS_MOSAIC_GPU:
        with kernels.config(INTERPRET):
            program = jax.make_jaxpr(attnorm.dot_product_attention)(*(jnp.bfloat16(x) for x in arrays))
        assert "attnorm_gpu_forward" in str(program)


@INTERPRETED
@pytest.mark.parametrize("name", FUSED)
def test_a_translated_rule_has_the_same_values_and_slopes(name):
    from attnorm.kernels.gpu_rule import translated

    rule = attnorm.get_normalizer(name)
    s, m, df = np.random.default_rng(0).normal(size=(3, 8, 16)).astype(np.float32)
    s[0, :4] = -np.inf, -30, 1e-4, 30
    m = np.maximum(m, s.max(1, keepdims=True))

    def slopes(s, m, df):
        (f, stats), pull = jax.vjp(lambda s: rule.terms(s, m), s)
        return f, stats, *pull((df, (df,) * len(stats)))

    got, expected = translated(slopes)(s, m, df), slopes(s, m, df)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6)


def check(case, monkeypatch, bias=False):
    """The contract's check; without the bias that some of its restrictions have, gradients come from the kernels."""
    restrict = cases.restrict

    def restrict_alone(case, rng):
        options = restrict(case, rng)
        return options if bias else {k: x for k, x in options.items() if k != "bias"}

    monkeypatch.setattr(cases, "restrict", restrict_alone)
    for results in (test_grid.oracle, test_grid.plain_results):
        results.cache_clear()  # which know a case by its name
    with kernels.config(INTERPRET):
        test_grid.check(case, "pallas_gpu", monkeypatch)
    for results in (test_grid.oracle, test_grid.plain_results):
        results.cache_clear()


@INTERPRETED
def test_causal(monkeypatch):
    check(Case(lengths=(97, 63), heads=(2, 1), restriction="causal", dtype="bf16"), monkeypatch)


# Both dtypes, head dims on either side of a tile, one and several tiles each way.
FACTORS = {
    "restriction": [
        "none",
        "causal",
        "causal-offset-per-batch",
        "window-offset",
        "window-causal",
        "both-lengths",
        "segments",
        "own-segments",
        "mask-NTS",
        "mask-1N1S",
        "mask-B1T1",
        "mask-1N11",
        "empty-rows",
        "soft-cap",
        "combination",
        "sparse",
    ],
    "lengths": [(1, 1), (1, 300), (300, 1), (97, 63), (128, 128), (192, 192), (200, 130)],
    "normalizer": [x for x in cases.NORMALIZERS if x[0] in FUSED],
    "width": [16, 40, 64, 72, 128],
    "value_width": [None, 64, 128],
    "heads": [(1, 1), (2, 2), (4, 2), (3, 1)],
    "batch": [1, 1, 2],
    "dtype": ["bf16", "f16"],
    "logits": list(cases.LOGITS),
    "log_norm": [True, False],
    "poison": [None, float("nan"), float("inf")],
}
SLOW_CASES = cases.pairwise(FACTORS, count=len(FACTORS["restriction"]), cost=8e6, seed=2)
WIDE_CASES = [
    Case(lengths=(10, 70), width=256, heads=(1, 1), restriction="causal-offset", dtype="bf16"),
    Case(lengths=(70, 10), width=16, value_width=300, heads=(1, 1), restriction="window", dtype="bf16"),
]


@INTERPRETED
@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES + WIDE_CASES, ids=str)
def test_slow_case(case, monkeypatch):
    check(case, monkeypatch)


@INTERPRETED
@pytest.mark.slow
def test_bias(monkeypatch):
    check(
        Case(lengths=(97, 163), heads=(4, 2), batch=2, restriction="combination", dtype="bf16"),
        monkeypatch,
        bias=True,
    )


def assert_like_reference(gradients, arrays, config=INTERPRET):
    """Two runs agree to the bit, and with the reference in float32 to some rounding errors of bfloat16."""
    with kernels.config(config):
        program = gradients("pallas_gpu")
        got, again = jax.device_get([program(*arrays), program(*arrays)])
    expected = gradients("reference")(*(x.astype(jnp.float32) for x in arrays))
    for a, b, c in zip(got, again, expected, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.max(np.abs(a.astype(np.float32) - c)) <= 0.02 * np.max(np.abs(c)) > 0


@INTERPRETED
@pytest.mark.slow
def test_no_warpgroup_races_with_a_copy():
    """Over more tiles than shared memory holds at once, in every kernel."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    arrays = [jnp.asarray(x, jnp.bfloat16) for x in make_arrays(B=1, T=200, S=400, N=1, K=1)]

    def gradients(implementation):
        def loss(query, key, value):
            out = attnorm.dot_product_attention(
                query, key, value, is_causal=True, query_offset=250, implementation=implementation
            )
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))

    detecting = kernels.Config(interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert_like_reference(gradients, arrays, detecting)


@INTERPRETED
@pytest.mark.slow
def test_gradients_under_vmap():
    """Of a batch of batches, where one key serves all."""
    rng = np.random.default_rng(0)
    shapes = (2, 1, 40, 2, 16), (1, 70, 1, 16), (2, 1, 70, 1, 16)
    arrays = [jnp.asarray(rng.normal(size=shape), jnp.bfloat16) for shape in shapes]

    def gradients(implementation):
        def loss(query, key, value):
            out = attnorm.dot_product_attention(
                query, key, value, is_causal=True, query_offset=30, implementation=implementation
            )
            return jnp.sum(out.astype(jnp.float32) ** 2)

        return jax.jit(jax.vmap(jax.grad(loss, argnums=(0, 1, 2)), in_axes=(0, None, 0)))

    assert_like_reference(gradients, arrays)


@INTERPRETED
@pytest.mark.slow
@pytest.mark.parametrize("name", ["softplus", "softpick"])
def test_rules_without_a_log_norm(name):
    """And with functions that are translated."""
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in make_arrays(B=1, T=40, S=70, N=2, K=1)]

    def gradients(implementation):
        def attend(query, key, value):
            return attnorm.dot_product_attention(
                query, key, value, normalizer=name, is_causal=True, implementation=implementation
            )

        def both(*arrays):
            out, pull = jax.vjp(attend, *arrays)
            return out, *pull(out)

        return jax.jit(both)

    assert_like_reference(gradients, arrays)
