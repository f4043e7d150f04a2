"""Equal layers as one module whose parameters have a leading layer axis: compiled once, however deep the model."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx
from jaxtyping import Array

Carry = TypeVar("Carry")  # a tree of arrays

# What the backward pass finds in memory; the rest it computes again.
REMAT_POLICIES = {
    "none": None,  # no recomputation
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # results of linear maps
    "full": jax.checkpoint_policies.nothing_saveable,  # inputs of layers alone
}


def make_stack(make_layer: Callable[[nnx.Rngs], nnx.Module], num_layers: int, rngs: nnx.Rngs) -> nnx.Module:
    """``num_layers`` independently initialised layers as one module. Layers hold nothing but parameters."""
    return nnx.split_rngs(splits=num_layers)(nnx.vmap(make_layer))(rngs)


def layer_of(stack: nnx.Module, index: int | Array) -> nnx.Module:
    """One layer of a stack."""
    graph, params = nnx.split(stack)
    return nnx.merge(graph, jax.tree.map(lambda param: param[index], params))


def run_stack(
    stack: nnx.Module, apply: Callable[[Any, Carry], Carry], x: Carry, *, scan: bool, remat: str
) -> Carry:
    """``apply(layer, x)`` for the first layer, then for the next with its result, and so on.

    Args:
      scan: compile one layer and loop over it; otherwise all layers are compiled one after the other, which takes
        longer, and lets XLA optimise across them.
      remat: one of :data:`REMAT_POLICIES`.
    """
    graph, params = nnx.split(stack)

    def step(x: Carry, layer_params: Any) -> tuple[Carry, None]:
        return apply(nnx.merge(graph, layer_params), x), None

    if remat != "none":
        # In a loop XLA cannot undo the recomputation by merging it with the forward pass.
        step = jax.checkpoint(step, policy=REMAT_POLICIES[remat], prevent_cse=not scan)
    num_layers = jax.tree.leaves(params)[0].shape[0]
    if scan:
        return jax.lax.scan(step, x, params)[0]
    for index in range(num_layers):
        x, _ = step(x, jax.tree.map(lambda param: param[index], params))  # noqa: B023
    return x
