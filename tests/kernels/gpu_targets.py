"""GPUs to compile for that are not here."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

# Name, compute capability, multiprocessors; of each of these: units for float32, threads, bytes of shared memory, and
# those that one block may take; GHz, bytes of memory and of the L2 cache, bytes per second.
CARDS = {
    "T4": ("Tesla T4", "7.5", 40, 64, 1024, 65536, 65536, 1.59, 16e9, 4e6, 320e9),
    "A100": ("NVIDIA A100-SXM4-80GB", "8.0", 108, 64, 2048, 167936, 166912, 1.41, 80e9, 40e6, 2039e9),
    "L4": ("NVIDIA L4", "8.9", 58, 128, 1536, 102400, 101376, 2.04, 24e9, 48e6, 300e9),
    "H100": ("NVIDIA H100 80GB HBM3", "9.0", 132, 128, 2048, 233472, 232448, 1.98, 80e9, 50e6, 3350e9),
    "B200": ("NVIDIA B200", "10.0", 148, 128, 2048, 233472, 232448, 1.97, 180e9, 126e6, 8000e9),
}
# What the compiler asks of a device.
DESCRIPTION = """
gpu_device_info {{
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  core_count: {cores}
  fpus_per_core: {units}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: {threads}
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {shared_of_block}
  shared_memory_per_core: {shared}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  clock_rate_ghz: {clock}
  device_memory_size: {memory:.0f}
  l2_cache_size: {cache:.0f}
  memory_bandwidth: {bandwidth:.0f}
}}
platform_name: "CUDA"
runtime_version {{ major: 13 minor: 0 patch: 0 }}
dnn_version_info {{ major: 9 minor: 12 }}
device_description_str: "{kind}"
"""


def target(card):
    """A place to compile for: an abstract mesh, and the sharding of everything."""
    kind, capability, cores, units, threads, shared, of_block, clock, memory, cache, bandwidth = CARDS[card]
    major, minor = capability.split(".")
    description = DESCRIPTION.format(
        kind=kind,
        major=major,
        minor=minor,
        cores=cores,
        units=units,
        threads=threads,
        shared=shared,
        shared_of_block=of_block,
        clock=clock,
        memory=memory,
        cache=cache,
        bandwidth=bandwidth,
    )
    topology = topologies.get_topology_desc("", platform="cuda", target_config=description, topology="1x1x1")
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="cuda")
    mesh = AbstractMesh((1,), ("d",), (AxisType.Auto,), abstract_device=device)
    return mesh, NamedSharding(Mesh(np.array(topology.devices), ("d",)), PartitionSpec())


def with_gradients(call):
    """The function (arrays, rule) -> results of the call, and the gradients of all floating point numbers."""

    def value_and_gradients(arrays, rule):
        floats, others = {}, {}
        for name, x in arrays.items():
            (floats if jnp.issubdtype(x.dtype, jnp.floating) else others)[name] = x
        results, pull = jax.vjp(lambda floats, rule: call(floats | others, rule), floats, rule)
        return results, pull(jax.tree.map(jnp.ones_like, results))

    return value_and_gradients
