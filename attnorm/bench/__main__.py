"""Speed and memory of attention, in one of six ways: ``python -m attnorm.bench``.

By default, or with ``--device``, implementations × normalisers and their peers are measured on this machine: each in
a process of its own, in turn with the others. ``--cost`` measures the time of normalisers over that of softmax, in
one process and on the CPU. ``--compile-only`` compiles the TPU kernels for a chip that is not there and reports memory
and code. ``--static-cycles`` counts their cycles and those of their peers. The last two need libtpu. Measured and
counted figures are in different reports. ``--context N`` splits a sequence over N virtual devices, compares with one
device and counts the bytes that are sent; with ``--compile-only``, over N chips of a topology. ``--decode`` measures
how many tokens a second a small model generates on the CPU, with a cache and without; it needs Flax.
"""

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from attnorm.bench import (
    compile_only,
    context,
    cost,
    cycles,
    measured,
    plot,
    report,
    static_cycles,
    tpu_kernels,
)
from attnorm.bench.contenders import DEVICES, DTYPES, PASSES, PEERS, Case, default_contenders, is_installed
from attnorm.normalizers import normalizer_names
from attnorm.topology import LibtpuMissing, UnknownTopology

# Defaults, by way of measuring; an option that is not listed for a way is refused there.
_DEVICE, _COST, _COMPILE, _STATIC = "--device", "--cost", "--compile-only", "--static-cycles"
_CONTEXT, _CONTEXT_COMPILE, _DECODE = "--context", "--context and --compile-only", "--decode"
_DEFAULTS: dict[str, dict[str, Any]] = {
    _DEVICE: dict(
        normalizers=None,
        implementations=None,
        peers=None,
        lengths=None,
        dtypes=None,
        passes=list(PASSES),
        rounds=6,
        check=False,
        torch_python=None,
        plot=None,
    ),
    _COST: dict(normalizers=None, lengths=[2048], dtypes=["float32"], rounds=10),
    _COMPILE: dict(
        normalizers=["l2", "softmax", "lp", "sink"], topology=None, blocks=list(tpu_kernels.BLOCKS)
    ),
    _STATIC: dict(normalizers=["l2", "softmax", "lp", "sink"], blocks=list(tpu_kernels.BLOCKS), plot=None),
    _CONTEXT: dict(normalizers=["l2"], lengths=[2048]),
    _CONTEXT_COMPILE: dict(normalizers=["l2"], lengths=[131_072], topology=None),
    _DECODE: dict(normalizers=["l2"], lengths=[1024, 4096], rounds=6),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    way = _settle(parser, options)
    for name in ("out", "plot"):
        if getattr(options, name):
            _reserve(parser, name, getattr(options, name), adds=way == _COST)
    # Devices are for the processes that are measured.
    jax.config.update("jax_platforms", "cpu")
    if way == _CONTEXT:
        context.prepare(options.context)
    try:
        result = _RUN[way](options)
        if options.out:
            report.write(result, options.out)
    except LibtpuMissing as error:
        parser.error(f"argument {way}: {error}")
    except UnknownTopology as error:
        parser.error(f"argument --topology: {error}")
    except measured.NoDevice as error:
        parser.error(f"argument --device: JAX finds no {options.device} here: {error}")
    finally:
        for path in filter(None, (options.out, options.plot)):
            if path.stat().st_size == 0:  # nothing came of it
                path.unlink()
    failures = result.get("failures") or any(case["failures"] for case in result.get("cases", ()))
    return 1 if failures else 0


def _measure(options) -> dict:
    device = DEVICES[options.device]
    contenders = default_contenders(
        options.device,
        options.normalizers or device.normalizers,
        options.implementations,
        options.peers,
        options.torch_python,
    )
    cases = [
        Case(options.device, length, dtype, direction)
        for dtype in options.dtypes or device.dtypes
        for direction in options.passes
        for length in options.lengths or device.lengths
    ]
    result = measured.run(
        options.device,
        cases,
        contenders,
        options.rounds,
        _progress,
        checked=options.check,
        torch_python=options.torch_python,
        out=options.out,
    )
    if options.plot:
        plot.times(result, options.plot)
    return result


def _compare_costs(options) -> dict:
    (length,), (dtype,) = options.lengths, options.dtypes
    result = cost.run(options.normalizers or normalizer_names(), length, dtype, options.rounds, _progress)
    print(cost.text(result), flush=True)
    return cost.file_of([*(cost.runs_of(options.out) if options.out else ()), result])


def _compile(options) -> dict:
    result = compile_only.run(options.topology, options.normalizers, options.blocks, _progress)
    print(compile_only.text(result), flush=True)
    return result


def _count(options) -> dict:
    result = static_cycles.run(options.static_cycles, options.normalizers, options.blocks, _progress)
    print(static_cycles.text(result), flush=True)
    if options.plot:
        plot.cycles(result, options.plot)
    return result


def _split(options) -> dict:
    (length,) = options.lengths
    result = context.run(options.context, length, options.normalizers, _progress)
    print(context.text(result), flush=True)
    return result


def _compile_split(options) -> dict:
    (length,) = options.lengths
    result = context.compile_only(options.topology, options.context, length, options.normalizers, _progress)
    print(context.text(result), flush=True)
    return result


def _decode(options) -> dict:
    from attnorm.bench import decode  # here, because the others do without Flax

    result = decode.run(options.normalizers, options.lengths, options.rounds, _progress)
    print(decode.text(result), flush=True)
    return result


_RUN: dict[str, Callable] = {
    _DEVICE: _measure,
    _COST: _compare_costs,
    _COMPILE: _compile,
    _STATIC: _count,
    _CONTEXT: _split,
    _CONTEXT_COMPILE: _compile_split,
    _DECODE: _decode,
}


def _progress(message):
    print(message, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m attnorm.bench",
        description=__doc__.replace("``", ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--device", choices=DEVICES, default="cpu", help="what to measure on (default: cpu)")
    way.add_argument("--cost", action="store_true", help="time of normalisers over softmax's, on the CPU")
    way.add_argument("--compile-only", action="store_true", help="memory and code of the TPU kernels")
    way.add_argument("--decode", action="store_true", help="tokens a second, generated on the CPU")
    way.add_argument(
        "--static-cycles",
        nargs="+",
        choices=cycles.CHIPS,
        metavar="CHIP",
        help=f"cycles of the TPU kernels: {', '.join(cycles.CHIPS)}",
    )
    # None is "not given"; what it means depends on the way.
    add = parser.add_argument
    add(
        "--context",
        type=_positive,
        metavar="N",
        help="a sequence split over N devices; also with --compile-only",
    )
    add(
        "--normalizers",
        nargs="+",
        choices=[*normalizer_names(), "all"],
        metavar="NAME",
        help=f"all, not with --device, or of {', '.join(normalizer_names())} (default: {_shown('normalizers')}; --cost: all)",
    )
    add(
        "--implementations",
        nargs="+",
        metavar="NAME",
        help="as in attnorm.dot_product_attention; for --device",
    )
    add("--peers", nargs="*", choices=PEERS, metavar="NAME", help=f"of {', '.join(PEERS)}; for --device")
    add(
        "--lengths",
        nargs="+",
        type=_positive,
        metavar="L",
        help=f"numbers of tokens; one with --cost and --context (default: {_shown('lengths')})",
    )
    add("--dtypes", nargs="+", choices=DTYPES, help=f"of the inputs (default: {_shown('dtypes')})")
    add("--passes", nargs="+", choices=PASSES, help=f"what is timed (default: {' '.join(PASSES)})")
    add(
        "--rounds",
        type=_positive,
        help="how often all are measured in turn; an even number goes equally often through both orders (default: "
        f"{_shown('rounds')})",
    )
    add(
        "--check",
        action="store_true",
        default=None,
        help="first compare every result with float64; for --device",
    )
    add("--torch-python", metavar="PYTHON", help="an interpreter with PyTorch and JAX, for the peer torch")
    add("--topology", metavar="NAME", help="for --compile-only, such as v5e:2x2")
    add("--blocks", nargs="+", type=_block, metavar="SIZE", help="for --compile-only and --static-cycles")
    add(
        "--out",
        type=Path,
        metavar="FILE",
        help="a new JSON file, and no file that exists, but with --cost, which adds to the reports there; where "
        "cases are measured, kept up to date after each",
    )
    add("--plot", type=Path, metavar="FILE", help="a figure, by its suffix, and no file that exists")
    return parser


def _shown(name: str) -> str:
    """The defaults of an option by way, those of a device by device."""
    shown = {
        f"--device {key}": getattr(device, name) for key, device in DEVICES.items() if hasattr(device, name)
    }
    shown |= {way: defaults[name] for way, defaults in _DEFAULTS.items() if defaults.get(name) is not None}
    texts = {
        way: " ".join(map(str, x)) if isinstance(x, list | tuple) else str(x) for way, x in shown.items()
    }
    return "; ".join(f"{', '.join(ways)}: {text}" for text, ways in _by_value(texts).items())


def _by_value(texts: dict[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for way, text in texts.items():
        found.setdefault(text, []).append(way)
    return found


def _settle(parser, options) -> str:
    """Fills in the defaults of the way that was asked for; refuses what has no meaning there."""
    ways = {
        _COST: options.cost,
        _COMPILE: options.compile_only,
        _STATIC: options.static_cycles,
        _DECODE: options.decode,
    }
    way = next((way for way, is_wanted in ways.items() if is_wanted), _DEVICE)
    if options.context:
        if options.device != "cpu" or way in (_COST, _STATIC, _DECODE):
            parser.error(f"argument --context: has no meaning with {way}")
        if way == _COMPILE and options.context % 2:
            parser.error(f"argument --context: an even number is wanted with {way}, got {options.context}")
        way = _CONTEXT_COMPILE if way == _COMPILE else _CONTEXT
    if options.normalizers and "all" in options.normalizers:
        if options.normalizers != ["all"]:
            parser.error("argument --normalizers: all stands alone")
        options.normalizers = list(normalizer_names())
        if way in (_COMPILE, _STATIC, _CONTEXT_COMPILE):
            options.normalizers = tpu_kernels.served(options.normalizers)
        if way == _DEVICE:
            parser.error("argument --normalizers: all has no meaning with --device, but with --cost")
    known = {name for defaults in _DEFAULTS.values() for name in defaults}
    for name in sorted(known):
        value = getattr(options, name)
        if value is None:
            setattr(options, name, _DEFAULTS[way].get(name))
        elif name not in _DEFAULTS[way] and name != "normalizers":
            parser.error(f"argument {_flag(name)}: has no meaning with {way}")
        elif isinstance(value, list) and len(set(value)) < len(value):
            parser.error(f"argument {_flag(name)}: values are repeated: {' '.join(map(str, value))}")
    if way in (_COMPILE, _CONTEXT_COMPILE) and not re.fullmatch(r"\w+:\d+(x\d+)+", options.topology or ""):
        parser.error(f"argument --topology: a name such as v5e:2x2 is wanted, got {options.topology!r}")
    if way == _COST and (len(options.lengths) > 1 or len(options.dtypes) > 1):
        parser.error(f"argument --lengths, --dtypes: one of each is wanted with {way}")
    if way == _DECODE and not importlib.util.find_spec("flax"):
        parser.error(f"argument {way}: needs flax, which is not installed")
    if way in (_CONTEXT, _CONTEXT_COMPILE) and len(options.lengths) > 1:
        parser.error(f"argument --lengths: one is wanted with {way}")
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("argument --plot: needs matplotlib, which is not installed")
    for peer in options.peers or ():
        if peer not in DEVICES[options.device].peers:
            parser.error(f"argument --peers: {peer} does not run on {options.device}")
        if not is_installed(peer) and not (peer == "torch" and options.torch_python):
            parser.error(f"argument --peers: {peer} is not installed")
    return way


def _flag(name):
    return "--" + name.replace("_", "-")


def _reserve(parser, name, path, adds=False):
    try:
        path.touch(exist_ok=adds)
        if adds:
            cost.runs_of(path)
    except FileExistsError:
        parser.error(f"argument --{name}: {path} exists; choose another name or remove it")
    except ValueError as error:
        parser.error(f"argument --{name}: {error}")
    except OSError as error:
        parser.error(f"argument --{name}: cannot write {path}: {error.strerror}")


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"a positive whole number is wanted, got {text!r}")
    return number


def _block(text: str) -> int:
    number = _positive(text)
    if tpu_kernels.LENGTH % number or number % 128:
        raise argparse.ArgumentTypeError(
            f"a multiple of 128 that divides {tpu_kernels.LENGTH} is wanted, got {text!r}"
        )
    return number


if __name__ == "__main__":
    sys.exit(main())
