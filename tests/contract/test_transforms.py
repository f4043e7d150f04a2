"""JAX transformations of the attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import attnorm
from tests.checks import double_precision
from tests.contract.helpers import assert_near, make_arrays

NAMES = ("query", "key", "value", "bias", "mask", "p")


def make_inputs(copies=None):
    """Arrays by name; with a leading axis of `copies` if given."""
    rng = np.random.default_rng(0)
    lead = () if copies is None else (copies,)
    return {
        "query": rng.normal(size=(*lead, 2, 20, 4, 16)).astype(np.float32),
        "key": rng.normal(size=(*lead, 2, 30, 2, 16)).astype(np.float32),
        "value": rng.normal(size=(*lead, 2, 30, 2, 16)).astype(np.float32),
        "bias": rng.normal(size=(*lead, 1, 4, 20, 1)).astype(np.float32)
        + rng.normal(size=(*lead, 1, 4, 20, 30)).astype(np.float32),
        "mask": rng.random((*lead, 2, 1, 20, 30)) < 0.7,
        "p": rng.uniform(1, 4, (*lead, 4)).astype(np.float32),
    }


def call(attend, inputs):
    inputs = dict(inputs)
    normalizer = attnorm.get_normalizer("lp", p=inputs.pop("p"))
    return attend(**inputs, normalizer=normalizer, is_causal=True, query_offset=8, return_log_norm=True)


def loss(attend, inputs, names):
    def function(chosen):
        output, log_norm = call(attend, inputs | chosen)
        return jnp.sum(output**2) + jnp.sum(jnp.where(jnp.isfinite(log_norm), jnp.sin(log_norm), 0))

    return function, {name: inputs[name] for name in names}


def test_jit_and_no_jit_agree(attend):
    inputs = make_inputs()
    eager, compiled = call(attend, inputs), jax.jit(functools.partial(call, attend))(inputs)
    for a, b in zip(eager, compiled, strict=True):
        assert_near("result", a, b, 2e-6)


@pytest.mark.parametrize(
    "mapped",
    [(name,) for name in NAMES] + [("query", "bias"), ("key", "value"), ("bias", "mask"), NAMES],
    ids="-".join,
)
def test_vmap_of_the_gradient_over_any_argument(attend, mapped):
    shared, many = make_inputs(), make_inputs(copies=3)
    names = ("query", "key", "value", "bias", "p")

    def gradients(chosen):
        inputs = shared | chosen
        function, differentiated = loss(attend, inputs, names)
        return call(attend, inputs), jax.grad(function)(differentiated)

    chosen = {name: many[name] for name in mapped}
    together = jax.jit(jax.vmap(gradients))(chosen)
    single = jax.jit(gradients)
    alone = [single(jax.tree.map(lambda x, k=k: x[k], chosen)) for k in range(3)]
    for a, b in zip(
        jax.tree.leaves(together), jax.tree.leaves(jax.tree.map(lambda *x: np.stack(x), *alone)), strict=True
    ):
        assert np.isfinite(b).all()
        assert_near("mapped", a, b, 1e-5)


def test_vmap_along_other_axes(attend):
    query, key, value = make_arrays(T=20, S=30)
    expected = jax.jit(attend)(query, key, value)
    over_batch = jax.jit(jax.vmap(attend))(query, key, value)
    assert_near("output", over_batch, expected, 1e-6)
    over_key_heads = jax.vmap(attend, in_axes=(2, 2, 2), out_axes=2)
    grouped = over_key_heads(query.reshape(2, 20, 2, 2, 16), key[:, :, :, None], value[:, :, :, None])
    assert_near("output", grouped.reshape(expected.shape), expected, 1e-6)


def test_jacrev_is_the_same_everywhere(attend):
    query, key, value = make_arrays(B=1, T=3, S=5, N=2, K=1, H=4)
    reference = functools.partial(
        attnorm.dot_product_attention, implementation="reference", precision="highest"
    )
    jacobians = [jax.jit(jax.jacrev(f, (0, 1, 2)))(query, key, value) for f in (attend, reference)]
    for got, expected in zip(*jacobians, strict=True):
        assert got.shape == (1, 3, 2, 4, *expected.shape[4:])
        assert_near("jacobian", got, expected, 2e-6)


def test_remat_changes_no_gradient(attend):
    inputs = make_inputs()
    function, chosen = loss(attend, inputs, ("query", "key", "value", "bias", "p"))
    expected = jax.jit(jax.grad(function))(chosen)
    got = jax.jit(jax.grad(jax.checkpoint(function)))(chosen)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_near("gradient", a, b, 1e-6)


def test_a_scan_over_layers(attend):
    query, key, value = make_arrays(B=1, T=20, S=20, N=2, K=2)
    scales = jnp.array([0.5, 1.0, 1.5])

    def scanned(x):
        return jax.lax.scan(lambda x, a: (x + attend(x * a, key, value, is_causal=True), None), x, scales)[
            0
        ].sum()

    def unrolled(x):
        for a in scales:
            x = x + attend(x * a, key, value, is_causal=True)
        return x.sum()

    got, expected = (jax.jit(jax.value_and_grad(f))(query) for f in (scanned, unrolled))
    assert_near("loss", got[0], expected[0], 1e-5)
    assert_near("gradient", got[1], expected[1], 3e-6)


def test_forward_mode_and_hessian_of_the_reference():
    with double_precision():
        inputs = jax.tree.map(lambda x: x.astype(np.float64) if x.dtype != bool else x, make_inputs())
        attend = functools.partial(attnorm.dot_product_attention, implementation="reference")
        function, chosen = loss(attend, inputs, ("query", "key", "value", "bias", "p"))
        rng = np.random.default_rng(1)
        direction = jax.tree.map(lambda x: rng.normal(size=x.shape), chosen)
        compiled = jax.jit(jax.grad(function))
        step = 1e-5

        def moved(sign):
            return compiled(jax.tree.map(lambda x, d: x + sign * step * d, chosen, direction))

        _, tangent = jax.jit(lambda x, d: jax.jvp(function, (x,), (d,)))(chosen, direction)
        gradient = compiled(chosen)
        by_gradient = sum(jnp.vdot(g, d) for g, d in zip(gradient.values(), direction.values(), strict=True))
        np.testing.assert_allclose(tangent, by_gradient, rtol=1e-10)
        _, second = jax.jit(lambda x, d: jax.jvp(jax.grad(function), (x,), (d,)))(chosen, direction)
        for name, got in second.items():
            expected = (moved(1)[name] - moved(-1)[name]) / (2 * step)
            assert_near(name, got, expected, 1e-7)


def test_hessian_of_the_reference_is_finite_where_rows_are_empty():
    query, key, value = make_arrays(B=1, T=3, S=5, N=2, K=1, H=4)
    mask = np.ones((3, 5), bool)
    mask[1], mask[2, 2:] = False, False

    def function(query):
        output = attnorm.dot_product_attention(query, key, value, mask=mask, implementation="reference")
        return jnp.sum(output**2)

    hessian = jax.jit(jax.hessian(function))(query)
    assert np.isfinite(hessian).all() and not hessian[:, 1].any() and hessian[:, 2].any()


def test_forward_mode_elsewhere_is_a_type_error():
    query, key, value = make_arrays(T=4, S=5)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(
            lambda query: attnorm.dot_product_attention(query, key, value, implementation="chunked"),
            (query,),
            (query,),
        )


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_on_one_device(attend, check_vma):
    inputs = make_inputs()
    names = ("query", "key", "value", "bias", "p")
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split, whole = PartitionSpec("data"), PartitionSpec()
    specs = {name: split if name in ("query", "key", "value") else whole for name in names}
    mask = inputs["mask"]

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(specs, split), out_specs=split, check_vma=check_vma
    )
    def sharded(arrays, mask):
        output, log_norm = call(attend, arrays | {"mask": mask})
        return output * jnp.where(jnp.isfinite(log_norm), log_norm, 0)[..., None]

    def plain(arrays, mask):
        output, log_norm = call(attend, arrays | {"mask": mask})
        return output * jnp.where(jnp.isfinite(log_norm), log_norm, 0)[..., None]

    arrays = {name: inputs[name] for name in names}
    got, expected = (
        jax.jit(jax.value_and_grad(lambda arrays, f=f: jnp.sum(f(arrays, mask) ** 2)))(arrays)
        for f in (sharded, plain)
    )
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert_near("gradient", a, b, 2e-6)


def test_equal_normalizers_share_a_compilation(attend):
    query, key, value = make_arrays(T=4, S=5)
    traces = []

    @jax.jit
    def function(query, normalizer):
        traces.append(normalizer)
        return attend(query, key, value, normalizer=normalizer)

    for _ in range(2):
        function(query, attnorm.get_normalizer("lp", p=3.0))
    for p in (1.0, 2.0):
        function(query, attnorm.get_normalizer("lp", p=jnp.array(p)))
    assert len(traces) == 2
