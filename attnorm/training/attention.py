"""The attention that a task calls: a member's normaliser, on each device's own part of the arrays."""

import functools
import logging
from typing import Any

import jax
from jax.sharding import Mesh

import attnorm
from attnorm import chunked
from attnorm.arguments import Options
from attnorm.attention import implementations_for
from attnorm.normalizers import Normalizer
from attnorm.sharding import platform_of
from attnorm.training.config import ConfigError
from attnorm.training.mesh import batch_axes
from attnorm.training.task import Attention

_log = logging.getLogger(__name__)


def make_attention(normalizer: Normalizer, mesh: Mesh) -> Attention:
    """Attention by a normaliser over a mesh of :data:`attnorm.training.mesh.AXES`.

    The batch is split over `data` and `fsdp`, or not at all where these do not divide it; heads over `tensor`; with a
    `context` axis, length too, by ring attention, or for a normaliser that it cannot serve by gathering all keys, which
    is logged once.

    Raises:
      ConfigError: when called, numbers of heads that `tensor` does not divide; a single head of keys may be shared.

    >>> import jax.numpy as jnp
    >>> from attnorm import get_normalizer
    >>> from attnorm.training.attention import make_attention
    >>> from attnorm.training.config import MeshConfig
    >>> from attnorm.training.mesh import make_mesh
    >>> attention = make_attention(get_normalizer("l2"), make_mesh(MeshConfig(data=-1, fsdp=1, context=1, tensor=1)))
    >>> attention(*jnp.ones((3, 1, 8, 2, 4)), is_causal=True).shape
    (1, 8, 2, 4)
    """
    options: Options = {"normalizer": normalizer, "implementation": implementations_for(platform_of(mesh))}
    head_axes = ("tensor",) if mesh.shape["tensor"] > 1 else ()
    # Of a device that is not this process's first, kernels learn by the mesh alone.
    if mesh.size == 1 and mesh.devices.flat[0] == jax.devices()[0]:
        return functools.partial(attnorm.dot_product_attention, **options)

    def attention(query, key, value, **given):
        axes = batch_axes(query.shape[0], mesh)
        for name, heads in (("query", query.shape[2]), ("key and value", key.shape[2])):
            if heads % mesh.shape["tensor"] and not (heads == 1 and name != "query"):
                raise ConfigError(
                    f"config.mesh.tensor must divide the {heads} {name} heads, got {mesh.shape['tensor']}"
                )
        if mesh.shape["context"] > 1:
            own: dict[str, Any] = {**options, **given}
            missing = own["normalizer"].needs - chunked.SERVES
            if missing:
                _log_once(type(own["normalizer"]).__name__, ", ".join(sorted(missing)))
            return attnorm.ring_attention(
                query,
                key,
                value,
                mesh=mesh,
                batch_axes=axes,
                head_axes=head_axes,
                variant="all_gather" if missing else "ring",
                **own,
            )
        bound = functools.partial(attnorm.dot_product_attention, **options)
        return attnorm.sharded(bound, mesh, axes, head_axes)(query, key, value, **given)

    return attention


@functools.cache
def _log_once(name, missing):
    _log.warning(
        "%s needs %s, which parts of a row do not tell: every device gathers the keys of the whole length",
        name,
        missing,
    )
