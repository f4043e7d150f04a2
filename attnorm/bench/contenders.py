"""The attention functions that are compared: ours, and those of jax.nn, tokamax, splash and PyTorch.

A contender is named by implementation and normaliser, as in ``chunked l2``, a peer by its own name. It is prepared
for one case and returns a function that runs it once.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from attnorm.attention import dot_product_attention, implementations_of
from attnorm.normalizers import get_normalizer

DTYPES = ("float32", "bfloat16")
PASSES = ("forward", "forward_backward")
# Parameters of a normaliser, where its defaults would make it one of the others.
PARAMS = {"lp": {"p": 3.0}}
# Attention that stores all logits is left out of longer cases.
DENSE = ("jax.nn", "reference")
LONGEST_DENSE = 4096


@dataclass(frozen=True)
class Device:
    """What is measured where by default.

    Cases have a batch of one, or as many as make up this number of tokens. ``one_process``: no more can use it.
    """

    platform: str
    heads: int
    head_dim: int
    tokens: int | None
    lengths: tuple[int, ...]
    dtypes: tuple[str, ...]
    normalizers: tuple[str, ...]
    implementations: tuple[str, ...]
    peers: tuple[str, ...]
    one_process: bool = False


DEVICES = {
    "cpu": Device(
        platform="cpu",
        heads=8,
        head_dim=64,
        tokens=None,
        lengths=(1024, 2048, 4096),
        dtypes=("float32",),
        normalizers=("l2", "softmax", "lp"),
        implementations=("chunked",),
        peers=("jax.nn", "torch"),
    ),
    "gpu": Device(
        platform="cuda",
        heads=16,
        head_dim=128,
        tokens=16384,
        lengths=(1024, 4096, 16384),
        dtypes=("bfloat16",),
        normalizers=("l2", "softmax"),
        implementations=("pallas_gpu", "chunked"),
        peers=("jax.nn", "cudnn", "tokamax"),
    ),
    "tpu": Device(
        platform="tpu",
        heads=8,
        head_dim=128,
        tokens=16384,
        lengths=(1024, 4096, 16384),
        dtypes=("bfloat16",),
        normalizers=("l2", "softmax"),
        implementations=("pallas_tpu", "chunked"),
        peers=("jax.nn", "splash", "tokamax"),
        one_process=True,
    ),
}
PEERS = tuple(dict.fromkeys(peer for device in DEVICES.values() for peer in device.peers))
_NEEDS_PACKAGE = ("torch", "tokamax")


@dataclass(frozen=True)
class Case:
    """Causal self-attention of one length; forward_backward returns the output and all gradients."""

    device: str
    length: int
    dtype: str
    direction: str

    def __str__(self):
        return f"L={self.length} {self.dtype} {self.direction}"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, L, N, H"""
        device = DEVICES[self.device]
        batch = max(1, device.tokens // self.length) if device.tokens else 1
        return (batch, self.length, device.heads, device.head_dim)

    def inputs(self) -> list[np.ndarray]:
        """Query, key, value and the cotangent of the output, each BxLxNxH, the same for every contender."""
        draw = np.random.default_rng(0).standard_normal
        return [draw(self.shape, np.float32) for _ in range(4)]

    asdict = dataclasses.asdict


def rule(normalizer: str):
    """The normaliser of that name as it is measured."""
    return get_normalizer(normalizer, **PARAMS.get(normalizer, {}))


def default_contenders(device: str, normalizers, implementations=None, peers=None, torch=None) -> list[str]:
    """Every pair that is asked for and every peer; where nothing is asked for, what there is here."""
    names = []
    for implementation in DEVICES[device].implementations if implementations is None else implementations:
        for normalizer in normalizers:
            if implementations is not None or implementation in implementations_of(rule(normalizer)):
                names.append(f"{implementation} {normalizer}")
    if peers is None:
        peers = [peer for peer in DEVICES[device].peers if is_installed(peer) or (peer == "torch" and torch)]
    return [*names, *peers]


def is_installed(peer: str) -> bool:
    return peer not in _NEEDS_PACKAGE or importlib.util.find_spec(peer) is not None


def fits(contender: str, case: Case) -> bool:
    """Whether a contender can be expected to have memory for a case."""
    return case.length <= LONGEST_DENSE or contender.split(" ")[0] not in DENSE


def normalizer_of(contender: str) -> str:
    """The normaliser that a contender computes; that of the peers is softmax."""
    return "softmax" if contender in PEERS else contender.split(" ")[1]


def prepare(name: str, case: Case, threads: int | None) -> tuple[Callable[[], list], int | None]:
    """Build and, for JAX, compile a contender.

    Returns:
      A function that gives the output, then the gradients, perhaps before they are there; and the bytes it takes
      beyond the inputs, where the compiler knows.
    """
    if name == "torch":
        return _prepare_torch(case, threads), None
    return _prepare_jax(name, case)


def _prepare_jax(name, case):
    import jax
    import jax.numpy as jnp

    attention = _jax_attention(name, case)

    def forward(query, key, value, _):
        return [attention(query, key, value)]

    def forward_backward(query, key, value, cotangent):
        output, vjp = jax.vjp(attention, query, key, value)
        return [output, *vjp(cotangent)]

    function = forward if case.direction == "forward" else forward_backward
    arguments = [jnp.asarray(x, case.dtype) for x in case.inputs()]
    compiled = jax.jit(function).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None  # every backend of XLA has it
    return lambda: compiled(*arguments), memory.temp_size_in_bytes + memory.output_size_in_bytes


def _jax_attention(name, case):
    import jax

    if name in ("jax.nn", "cudnn"):
        implementation = {"jax.nn": "xla", "cudnn": "cudnn"}[name]
        return functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation=implementation)
    if name == "tokamax":
        import tokamax
        from absl import flags

        flags.FLAGS.mark_as_parsed()  # it reads flags of its own, which no command line sets here
        return functools.partial(tokamax.dot_product_attention, is_causal=True)
    if name == "splash":
        return _splash(case)
    implementation, normalizer = name.split(" ")
    return functools.partial(
        dot_product_attention, normalizer=rule(normalizer), is_causal=True, implementation=implementation
    )


def _splash(case):
    import jax
    import jax.numpy as jnp
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        CausalMask,
        MultiHeadMask,
        make_splash_mha,
    )

    _, length, heads, head_dim = case.shape
    names = ["block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"]
    kernel = make_splash_mha(
        mask=MultiHeadMask([CausalMask((length, length))] * heads),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=BlockSizes(**dict.fromkeys(names, min(length, 1024)), use_fused_bwd_kernel=True),
    )

    def attention(query, key, value):
        query, key, value = (jnp.swapaxes(x, 1, 2) for x in (query * head_dim**-0.5, key, value))
        return jnp.swapaxes(jax.vmap(kernel)(query, key, value), 1, 2)

    return attention


def _prepare_torch(case, threads):
    import torch

    if threads is not None:
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
