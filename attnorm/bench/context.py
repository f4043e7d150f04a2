"""Attention over a sequence split over devices: whether it is right, what it sends, what memory it takes.

On virtual devices the results are compared with those of one device. Compiled for a TPU topology, the program
also tells what runs during the transfers, and the memory of each device.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import attnorm
from attnorm.bench import report
from attnorm.hlo import collectives
from attnorm.topology import UnknownTopology, tpu_devices

VARIANTS = ("ring", "all_gather")
# Of virtual devices, and of those compiled for.
SMALL = dict(heads=2, key_heads=1, head_dim=64, dtype="float32")
LARGE = dict(heads=8, key_heads=2, head_dim=128, dtype="bfloat16")
# Of the largest number: the order of summation differs between one device and several.
_TOLERANCE = 1e-5
# Where the number of devices doubles, what each of them holds halves, but for the program's constants.
_HALVED = 0.6


def prepare(num_devices: int) -> None:
    """Gives this process so many virtual devices; before JAX starts."""
    jax.config.update("jax_num_cpu_devices", num_devices)
    # Else XLA ends the process where a device waits long for others, which share its cores here.
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_collective_call_terminate_timeout_seconds=600"


def run(num_devices: int, length: int, normalizers: Sequence[str], progress: Callable[[str], None]) -> dict:
    """The report of runs, forward and backward, on as many virtual devices as were prepared."""
    devices = jax.devices()[:num_devices]
    result = report.new_report(
        f"run on {num_devices} virtual devices", devices=num_devices, length=length, is_causal=True, **SMALL
    )
    result |= {"programs": [], "failures": []}
    rng = np.random.default_rng(0)
    arrays = [jnp.asarray(rng.normal(size=x.shape), x.dtype) for x in _shapes(length, **SMALL)]
    for normalizer in normalizers:
        attention = functools.partial(attnorm.dot_product_attention, normalizer=normalizer, is_causal=True)
        expected = jax.jit(_with_gradients(attention))(*arrays)
        for variant in VARIANTS:
            label = f"{normalizer}, {variant}"
            progress(label)
            try:
                compiled = _compile(devices, length, SMALL, normalizer, variant)
            except NotImplementedError as error:
                progress(f"{label}: {error}")
                continue
            got = compiled(
                *(jax.device_put(x, s) for x, s in zip(arrays, compiled.input_shardings[0], strict=True))
            )
            errors = {
                name: float(np.max(np.abs(np.asarray(a) - np.asarray(b))) / np.max(np.abs(b)))
                for name, a, b in zip(("output", "query", "key", "value"), got, expected, strict=True)
            }
            sent = _sent(collectives(compiled.as_text()))
            result["programs"].append(
                {"normalizer": normalizer, "variant": variant, "errors": errors, **sent}
            )
            if not max(errors.values()) <= _TOLERANCE:
                result["failures"].append(f"{label}: differs from one device by {max(errors.values()):.2g}")
    return result


def compile_only(
    topology: str, num_devices: int, length: int, normalizers: Sequence[str], progress: Callable[[str], None]
) -> dict:
    """The report of programs compiled for so many chips of a topology, and for half as many."""
    chips = tpu_devices(topology)
    if num_devices > len(chips):
        raise UnknownTopology(f"{topology} has {len(chips)} devices, {num_devices} are wanted")
    result = report.new_report(
        f"compiled for {topology}, not run", devices=num_devices, length=length, is_causal=True, **LARGE
    )
    result |= {"programs": [], "failures": []}
    for normalizer in normalizers:
        before, refused = len(result["programs"] + result["failures"]), []
        for variant in VARIANTS:
            sizes = []
            for count in (num_devices // 2, num_devices):
                label = f"{normalizer}, {variant}, {count} devices"
                progress(f"{topology}: {label}")
                try:
                    compiled = _compile(chips[:count], length, LARGE, normalizer, variant, "pallas_tpu")
                except NotImplementedError as error:
                    progress(f"{label}: {error}")
                    refused.append(str(error))
                    continue
                except Exception as error:  # such as too little memory; the others go on
                    result["failures"].append(f"{label}: {report.reason(error)}")
                    continue
                memory = compiled.memory_analysis()
                hbm = {
                    "arguments": memory.argument_size_in_bytes,
                    "outputs": memory.output_size_in_bytes,
                    "temporaries": memory.temp_size_in_bytes,
                }
                sizes.append(sum(hbm.values()))
                found = collectives(compiled.as_text(), work="tpu_custom_call")
                sent = {**_sent(found), "overlapped_in_loops": _overlapped(found)}
                result["programs"].append(
                    {"normalizer": normalizer, "variant": variant, "devices": count, "hbm_bytes": hbm, **sent}
                )
                result["failures"] += [f"{label}: {fault}" for fault in _faults(variant, sent, length)]
            if variant == "ring" and len(sizes) == 2 and sizes[1] > _HALVED * sizes[0]:
                result["failures"].append(
                    f"{normalizer}, ring: {num_devices} devices need {sizes[1] / sizes[0]:.2f} of the memory of half"
                )
        if len(result["programs"] + result["failures"]) == before:
            reasons = "; ".join(dict.fromkeys(refused))
            result["failures"].append(f"{normalizer}: no program serves it: {reasons}")
    return result


def _faults(variant, sent, length):
    """What a program must not do."""
    faults = []
    all_keys = 4 * length * LARGE["key_heads"] * LARGE["head_dim"]
    if sent["largest_bytes"] > all_keys:
        faults.append(f"sends {sent['largest_bytes']} bytes at once, all keys in float32 have {all_keys}")
    if variant != "ring":
        return faults
    faults += [f"has {kind}" for kind in sent["sent_bytes"] if kind != "collective-permute"]
    overlapped, count = sent["overlapped_in_loops"]
    if overlapped < count:
        faults.append(f"waits for {count - overlapped} of the {count} transfers in loops")
    return faults


def _shapes(length, heads, key_heads, head_dim, dtype):
    """Of query, key, value and the output's cotangent."""
    return [
        jax.ShapeDtypeStruct((1, length, n, head_dim), dtype) for n in (heads, key_heads, key_heads, heads)
    ]


def _with_gradients(attention):
    def function(query, key, value, cotangent):
        output, pullback = jax.vjp(attention, query, key, value)
        return output, *pullback(cotangent)

    return function


def _compile(devices, length, sizes, normalizer, variant, implementation=None):
    mesh = Mesh(np.array(devices), ("context",), axis_types=(AxisType.Auto,))
    attention = functools.partial(
        attnorm.ring_attention,
        mesh=mesh,
        variant=variant,
        normalizer=normalizer,
        is_causal=True,
        implementation=implementation,
    )
    split = NamedSharding(mesh, PartitionSpec(None, "context"))
    function = jax.jit(_with_gradients(attention), in_shardings=split, out_shardings=split)
    # Kernels choose their blocks for the chip that the mesh names.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return function.lower(*_shapes(length, **sizes)).compile()


def _sent(found) -> dict:
    """By kind of collective, the bytes that a device sends, and the most that one gives at once."""
    sent: dict[str, int] = {}
    for one in found:
        sent[one.kind] = sent.get(one.kind, 0) + round(one.times * one.bytes_sent)
    return {"sent_bytes": sent, "largest_bytes": max((one.bytes for one in found), default=0)}


def _overlapped(found) -> list[int]:
    """How many of the transfers in loops run beside work, and of how many."""
    in_loops = [one.is_overlapped for one in found if one.is_in_loop]
    return [sum(map(bool, in_loops)), len(in_loops)]


def text(result: dict) -> str:
    """The report as a table."""
    is_compiled = any("hbm_bytes" in program for program in result["programs"])
    measured = (
        ["in loops, beside work", "HBM arguments", "outputs", "temporaries"]
        if is_compiled
        else ["largest error"]
    )
    rows = [["MiB", "devices", "sent by each", "at once", *measured, "by"]]
    for program in result["programs"]:
        sizes = [sum(program["sent_bytes"].values()), program["largest_bytes"]]
        if is_compiled:
            sizes += program["hbm_bytes"].values()
        cells = [f"{size / 2**20:.2f}" for size in sizes]
        if is_compiled:
            cells.insert(2, "{} of {}".format(*program["overlapped_in_loops"]))
        else:
            cells.append(f"{max(program['errors'].values()):.1e}")
        cells = [str(program.get("devices", result["settings"]["devices"])), *cells]
        cells.append(", ".join(program["sent_bytes"]) or "-")
        rows.append([f"{program['normalizer']}, {program['variant']}", *cells])
    title = f"\nForward and backward, {result['kind']}: {result['settings']}"
    return "\n".join([report.table(title, rows), *(f"failed: {x}" for x in result["failures"])])
