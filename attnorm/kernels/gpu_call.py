"""One Mosaic GPU call with trees of arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from attnorm import _compat


def kernel_call(kernel, *, name, grid, groups, inputs, outputs, scratch, static) -> Any:
    """Calls ``kernel(inputs, outputs, scratch)``, each a tree of references like what is given here.

    ``grid`` maps axis names to sizes; a thread block has ``groups`` warpgroups that compute, and one more.
    """
    inputs, inputs_tree = jax.tree.flatten(inputs)
    axes = _compat.varying_axes(inputs)
    inputs = _compat.vary([jnp.asarray(x) for x in inputs], axes)

    def flat_kernel(*refs):
        num_inputs, num_outputs = len(inputs), len(outputs)
        kernel(
            inputs_tree.unflatten(refs[:num_inputs]),
            refs[num_inputs : num_inputs + num_outputs],
            refs[num_inputs + num_outputs :],
        )

    flat_kernel.__name__ = name
    results = plgpu.kernel(
        flat_kernel,
        out_type=outputs,
        scratch_types=scratch,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=groups + 1,
        thread_name="group",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        interpret=static.interpret,
    )(*inputs)
    return _compat.vary(results, axes)  # the call itself forgets them
