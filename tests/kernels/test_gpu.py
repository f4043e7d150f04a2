"""Which GPU kernels serve a call; and those for Hopper, interpreted with their warpgroups, barriers and copies.

The interpreter comes with JAX 0.12. On older JAX the kernels for Hopper refuse every call, which is tested too.
"""

import logging
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import attnorm
from attnorm import _compat, attention, kernels
from attnorm.kernels import gpu
from tests.contract import cases, test_grid, test_masked
from tests.contract.cases import Case
from tests.contract.helpers import make_arrays, make_cotangents, oracle
from tests.kernels.features import FUSED

L2 = attnorm.get_normalizer("l2")
INTERPRET = kernels.Config(interpret=True)
HOPPER = kernels.Config(gpu="hopper", interpret=True)
INTERPRETED = pytest.mark.skipif(not _compat.HAS_MOSAIC_GPU, reason="the interpreter comes with JAX 0.12")


def narrow(H=16, dtype=jnp.bfloat16):
    return jnp.ones((1, 8, 2, H), dtype)


def refusal(query, **options):
    with pytest.raises(NotImplementedError) as error:
        attnorm.dot_product_attention(query, query, query, implementation="pallas_gpu", **options)
    return str(error.value)


def test_old_jax_is_refused_by_its_version(monkeypatch):
    monkeypatch.setattr(_compat, "HAS_MOSAIC_GPU", False)
    with kernels.config(HOPPER):
        assert f"JAX 0.12 or newer, this is {jax.__version__}" in refusal(narrow())


def test_jax_without_triton_is_refused(monkeypatch):
    monkeypatch.setattr(_compat, "HAS_PALLAS_TRITON", False)
    with kernels.config(kernels.Config(gpu="portable", interpret=True)):
        assert "no Triton backend" in refusal(narrow())


def test_the_version_decides():
    with kernels.config(HOPPER):
        reason = gpu.supports(narrow(), L2, None, None)
    assert (reason is None) == (jax.__version_info__ >= (0, 12))


def test_what_it_lacks_is_refused_by_name():
    with kernels.config(HOPPER):
        assert "dtype float32" in refusal(narrow(dtype=jnp.float32))
    with kernels.config(INTERPRET), jax.enable_x64(True):
        assert refusal(narrow(dtype=jnp.float64)).count("dtype float64") == 2
    assert "head dim 264" in refusal(narrow(H=264))
    assert "dropout" in refusal(narrow(), dropout_rate=0.1, dropout_rng=jax.random.key(0))
    assert "precision" in refusal(narrow(), precision=jax.lax.DotAlgorithmPreset.BF16_BF16_F32)
    assert "needs count, map" in refusal(narrow(), normalizer="ssmax")


def test_a_query_replicated_over_explicit_axes_is_refused():
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(AxisType.Explicit,))
    query = narrow()
    with jax.sharding.use_abstract_mesh(mesh), pytest.raises(NotImplementedError, match="replicated"):
        jax.eval_shape(lambda x: attnorm.dot_product_attention(x, x, x, implementation="pallas_gpu"), query)


def test_a_set_of_kernels_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match='gpu must be None, "hopper" or "portable", got \'ampere\''):
        kernels.Config(gpu="ampere")


def served_by(monkeypatch, dtype, **card):
    """Which kernels would serve a dtype on a card, and what all say."""
    monkeypatch.setattr(gpu, "device", lambda: SimpleNamespace(**card))
    query = narrow(dtype=dtype)
    chosen = [name for name, reason in gpu._refusals(query.dtype).items() if reason is None]
    return chosen[:1], gpu.supports(query, L2, None, None)


@INTERPRETED
def test_the_card_decides(monkeypatch):
    h200 = dict(device_kind="NVIDIA H200", compute_capability="9.0")
    assert served_by(monkeypatch, jnp.bfloat16, **h200) == (["hopper"], None)
    assert served_by(monkeypatch, jnp.float32, **h200) == (["portable"], None)
    for version, expected in (("12080", "portable"), ("12091", "hopper"), ("13000", "hopper")):
        client = SimpleNamespace(platform_version=f"PJRT C API\ncuda {version}")
        assert served_by(monkeypatch, jnp.bfloat16, **h200, client=client) == ([expected], None)
    for kind, capability in {"NVIDIA A100": "8.0", "NVIDIA L4": "8.9", "NVIDIA B200": "10.0"}.items():
        card = dict(device_kind=kind, compute_capability=capability)
        assert served_by(monkeypatch, jnp.bfloat16, **card) == (["portable"], None)
    for kind, capability in {"Tesla T4": "7.5", "AMD MI300X": "gfx942"}.items():
        chosen, reason = served_by(monkeypatch, jnp.bfloat16, device_kind=kind, compute_capability=capability)
        assert not chosen and reason.count(kind) == 2 and f"8.0 or newer, this is {kind}" in reason
    # Ahead of time a card has no capability, only a name.
    for kind, expected in {
        "NVIDIA GH200 480GB": ["hopper"],
        "NVIDIA A100": ["portable"],
        "Tesla T4": [],
    }.items():
        assert served_by(monkeypatch, jnp.bfloat16, device_kind=kind)[0] == expected


def test_a_gpu_prefers_its_kernels_and_falls_back_with_a_reason(monkeypatch, caplog):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    attention._log_once.cache_clear()
    arrays = make_arrays(B=1, T=8, S=8)
    with caplog.at_level(logging.DEBUG, "attnorm.attention"):
        got = attnorm.dot_product_attention(*arrays)
    np.testing.assert_array_equal(got, attnorm.dot_product_attention(*arrays, implementation="chunked"))
    assert "pallas_gpu: dtype float32" in caplog.text and "8.0 or newer, this is cpu" in caplog.text
    assert "by chunked" in caplog.text
    names = {jnp.float32: "attnorm_triton_forward", jnp.bfloat16: "attnorm_gpu_forward"}
    if not _compat.HAS_MOSAIC_GPU:
        names[jnp.bfloat16] = "attnorm_triton_forward"
    for dtype, name in names.items():
        with kernels.config(INTERPRET):
            program = jax.make_jaxpr(attnorm.dot_product_attention)(*(jnp.asarray(x, dtype) for x in arrays))
        assert name in str(program)


@INTERPRETED
@pytest.mark.parametrize("name", FUSED)
def test_a_translated_rule_has_the_same_values_and_slopes(name):
    from attnorm.kernels.gpu_rule import translated

    rule = attnorm.get_normalizer(name, **FUSED[name])
    s, m, df = np.random.default_rng(0).normal(size=(3, 8, 16)).astype(np.float32)
    s[0, :4] = -np.inf, -30, 1e-4, 30
    m = np.maximum(m, s.max(1, keepdims=True))

    def slopes(s, m, df):
        (f, stats), pull = jax.vjp(lambda s: rule.terms(s, m), s)
        return f, stats, *pull((df, (df,) * len(stats)))

    got, expected = translated(slopes)(s, m, df), slopes(s, m, df)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=4e-6)


def check(case, monkeypatch, bias=False, config=HOPPER):
    """The contract's check; without the bias that some of its restrictions have, gradients come from the kernels."""
    restrict = cases.restrict

    def restrict_alone(case, rng):
        options = restrict(case, rng)
        return options if bias else {k: x for k, x in options.items() if k != "bias"}

    monkeypatch.setattr(cases, "restrict", restrict_alone)
    for results in (test_grid.oracle, test_grid.plain_results):
        results.cache_clear()  # which know a case by its name
    with kernels.config(config):
        test_grid.check(case, "pallas_gpu")
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


def assert_like_reference(gradients, arrays, config=HOPPER):
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

    detecting = kernels.Config(gpu="hopper", interpret=plgpu.InterpretGPUParams(detect_races=True))
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


def nan_results(config, dtype, **options):
    """With NaN in one row of query, key and value in turn: output and gradients, and the oracle's."""
    query, key, value = make_arrays(B=1, T=130, S=130, N=1, K=1)
    d_output, _ = make_cotangents(query, value)
    names = ("query", "key", "value")

    @jax.jit
    def results(query, key, value, d_output):
        def attend(*arrays):
            return attnorm.dot_product_attention(*arrays, implementation="pallas_gpu", **options)

        out, pull = jax.vjp(attend, query, key, value)
        return out, *pull(d_output)

    for where in range(3):
        arrays = [x.astype(np.dtype(dtype)) for x in (query, key, value, d_output)]
        arrays[where][0, 60] = np.nan
        with kernels.config(config):
            got = jax.device_get(results(*arrays))
        *wide, d_wide = (x.astype(np.float32) for x in arrays)
        expected = oracle(
            dict(zip(names, wide, strict=True)), cotangents=(d_wide, None), log_norm=False, **options
        )
        assert np.isnan(expected.output).any()
        yield got, [expected.output, *(expected.gradients[name] for name in names)]


@INTERPRETED
@pytest.mark.slow
def test_a_visible_nan_breaks_the_gradients_of_whoever_sees_it_and_no_others():
    """Within a window: values and keys 60 reach queries 55 to 62, and these keys 53 to 67."""
    for got, expected in nan_results(HOPPER, jnp.bfloat16, local_window_size=(2, 5)):
        for a, b in zip(got, expected, strict=True):
            assert np.isnan(a[np.isnan(b)]).all()
            assert np.isfinite(a[:, [*range(53), *range(68, 130)]]).all()


@INTERPRETED
@pytest.mark.slow
def test_a_bias_of_minus_infinity_hides_no_nan_of_a_value():
    def attend(query, key, value, bias, **options):
        narrow = (jnp.asarray(x, jnp.bfloat16) for x in (query, key, value))
        return attnorm.dot_product_attention(*narrow, bias, implementation="pallas_gpu", **options)

    with kernels.config(HOPPER):
        test_masked.test_a_bias_of_minus_infinity_hides_no_nan_of_a_value(attend)


@INTERPRETED
@pytest.mark.slow
@pytest.mark.parametrize("name", ["softplus", "softpick", "sigmoid"])
def test_rules_without_a_log_norm(name):
    """And with functions that are translated, over several tiles each way."""
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in make_arrays(B=1, T=140, S=300, N=2, K=1)]

    def gradients(implementation):
        def attend(query, key, value):
            return attnorm.dot_product_attention(
                query,
                key,
                value,
                normalizer=attnorm.get_normalizer(name, **FUSED[name]),
                is_causal=True,
                query_offset=100,
                implementation=implementation,
            )

        def both(*arrays):
            out, pull = jax.vjp(attend, *arrays)
            return out, *pull(out)

        return jax.jit(both)

    assert_like_reference(gradients, arrays)
