"""One Pallas call with trees of arrays, and the layout that kernels want them in."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from attnorm import _compat
from attnorm.masks import Visibility


def pallas_call(kernel, *, name, grid, semantics, tables, inputs, in_specs, outputs, scratch, static) -> Any:
    """Calls ``kernel(tables, inputs, outputs, scratch)``, each a tree of references like what is given here.

    ``tables`` are in scalar memory, where ``in_specs`` find them too; ``outputs`` is a tree of (shape, dtype,
    BlockSpec); ``scratch`` of memory types.
    """
    is_output = lambda x: isinstance(x, tuple) and len(x) == 3 and isinstance(x[2], pl.BlockSpec)  # noqa: E731
    tables, tables_tree = jax.tree.flatten(tables)
    inputs, inputs_tree = jax.tree.flatten(inputs)
    outputs, outputs_tree = jax.tree.flatten(outputs, is_leaf=is_output)
    scratch, scratch_tree = jax.tree.flatten(scratch)
    specs = jax.tree.leaves(in_specs)
    axes = _compat.varying_axes(inputs)
    tables = _compat.vary(tables, axes)

    def with_tables(spec):
        def index_map(*args):
            return spec.index_map(*args[: len(grid)], tables_tree.unflatten(args[len(grid) :]))

        return pl.BlockSpec(spec.block_shape, index_map)

    def flat_kernel(*refs):
        ends = [len(tables)]
        for group in (inputs, outputs, scratch):
            ends.append(ends[-1] + len(group))
        groups = [refs[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        trees = (tables_tree, inputs_tree, outputs_tree, scratch_tree)
        kernel(*(tree.unflatten(group) for tree, group in zip(trees, groups, strict=True)))

    results = pl.pallas_call(
        flat_kernel,
        name=name,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=grid,
            in_specs=[with_tables(spec) for spec in specs],
            out_specs=[with_tables(spec) for _, _, spec in outputs],
            scratch_shapes=scratch,
        ),
        out_shape=[_compat.shape_dtype_struct(shape, dtype, axes) for shape, dtype, _ in outputs],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=semantics, vmem_limit_bytes=static.vmem_bytes
        ),
        interpret=static.interpret,
    )(*tables, *inputs)
    return jax.tree.unflatten(outputs_tree, results)


def precision_asked(precision):
    """That of a call; where this says None, that of ``jax.default_matmul_precision``."""
    return jax.config.jax_default_matmul_precision if precision is None else precision


def product_precision(precision):
    """For products of float32: HIGHEST for all above the default, for want of levels between.

    None is ``jax.default_matmul_precision``. NotImplemented for what is no level, such as an algorithm.
    """
    precision = precision_asked(precision)
    if precision is None:
        return jax.lax.Precision.DEFAULT
    try:
        levels = [jax.lax.Precision(p) for p in (precision if isinstance(precision, tuple) else (precision,))]
    except ValueError:
        return NotImplemented
    default = jax.lax.Precision.DEFAULT
    return default if all(level == default for level in levels) else jax.lax.Precision.HIGHEST


def hides(visibility: Visibility) -> bool:
    """Whether some pair of a query and a key may be hidden."""
    return bool(jax.tree.leaves(visibility)) or (visibility.left, visibility.right) != (None, None)


def heads_first(x, length: int, width: int):
    """(B, L, N, H) -> (B, N, length, width), padded with zeros."""
    x = jnp.swapaxes(x, 1, 2)
    return jnp.pad(x, [(0, 0), (0, 0), (0, length - x.shape[2]), (0, width - x.shape[3])])


def heads_last(x, length: int, width: int):
    """(B, N, L, H) -> (B, length, N, width), cut."""
    return jnp.swapaxes(x[:, :, :length, :width], 1, 2)


def rows_first(x, length: int):
    """(B, T, N) -> (B, N, 1, length), padded with zeros."""
    x = jnp.swapaxes(x, 1, 2)
    return jnp.pad(x, [(0, 0), (0, 0), (0, length - x.shape[2])])[:, :, None]


def rows_last(x, length: int):
    """(B, N, 1, L) -> (B, length, N), cut."""
    return jnp.swapaxes(x[:, :, 0, :length], 1, 2)


def pad_pairs(x, num_queries: int, num_keys: int):
    """(b, n, T|1, S|1) padded with zeros to these lengths, where it is not broadcast."""
    widths = [(0, 0), (0, 0)]
    for size, length in ((x.shape[2], num_queries), (x.shape[3], num_keys)):
        widths.append((0, 0 if size == 1 else length - size))
    return jnp.pad(x, widths)


def pad_ids(ids, length: int):
    """(B, L) padded by repeating the last id, so that no tile's range of ids grows."""
    return jnp.pad(ids, [(0, 0), (0, length - ids.shape[1])], mode="edge")
