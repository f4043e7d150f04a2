"""The attention functions that are compared: ours, and those of jax.nn and PyTorch.

Each contender is prepared for one case and returns a function that runs it once and waits for the result.
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

BATCH, HEADS, HEAD_DIM = 1, 8, 64
DTYPES = ("float32", "bfloat16")
PASSES = ("forward", "forward_backward")

OURS = {"l2": ("l2", {}), "softmax": ("softmax", {}), "lp_p3": ("lp", {"p": 3})}
PEERS = ("jax.nn", "torch")
CONTENDERS = (*OURS, *PEERS)


@dataclass(frozen=True)
class Case:
    """Causal self-attention of one length; forward_backward returns the output and all gradients."""

    length: int
    dtype: str
    direction: str

    def __str__(self):
        return f"L={self.length} {self.dtype} {self.direction}"

    def inputs(self) -> list[np.ndarray]:
        """Query, key, value and the cotangent of the output, each BxLxNxH, the same for every contender."""
        draw = np.random.default_rng(0).standard_normal
        return [draw((BATCH, self.length, HEADS, HEAD_DIM), np.float32) for _ in range(4)]

    asdict = dataclasses.asdict


def available() -> list[str]:
    """The contenders that can run here: all of them where PyTorch is installed."""
    return [name for name in CONTENDERS if name != "torch" or importlib.util.find_spec("torch")]


def prepare(name: str, case: Case, threads: int) -> Callable[[], list]:
    """Build and, for JAX, compile a contender. The function returned gives the output, then the gradients."""
    if name == "torch":
        return _prepare_torch(case, threads)
    return _prepare_jax(name, case)


def _prepare_jax(name: str, case: Case) -> Callable[[], list]:
    import jax
    import jax.numpy as jnp

    attention = _jax_attention(name)

    def forward(query, key, value, _):
        return [attention(query, key, value)]

    def forward_backward(query, key, value, cotangent):
        output, vjp = jax.vjp(attention, query, key, value)
        return [output, *vjp(cotangent)]

    function = forward if case.direction == "forward" else forward_backward
    arguments = [jnp.asarray(x, case.dtype) for x in case.inputs()]
    compiled = jax.jit(function).lower(*arguments).compile()
    return lambda: jax.block_until_ready(compiled(*arguments))


def _jax_attention(name: str) -> Callable:
    import functools

    import jax

    if name == "jax.nn":
        return functools.partial(jax.nn.dot_product_attention, is_causal=True)

    import attnorm

    normalizer, params = OURS[name]
    return functools.partial(
        attnorm.dot_product_attention,
        normalizer=attnorm.get_normalizer(normalizer, **params),
        is_causal=True,
        implementation="chunked",
    )


def _prepare_torch(case: Case, threads: int) -> Callable[[], list]:
    import torch

    torch.set_num_threads(threads)
    attention = torch.nn.functional.scaled_dot_product_attention
    # PyTorch's own layout is BxNxLxH; a transposed view would cost it a copy.
    query, key, value, cotangent = (
        torch.from_numpy(x).transpose(1, 2).contiguous().to(getattr(torch, case.dtype)) for x in case.inputs()
    )
    if case.direction == "forward":

        def run():
            with torch.no_grad():
                return [attention(query, key, value, is_causal=True)]

    else:
        leaves = [x.requires_grad_() for x in (query, key, value)]

        def run():
            output = attention(query, key, value, is_causal=True)
            return [output, *torch.autograd.grad(output, leaves, cotangent)]

    return run
