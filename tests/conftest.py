"""Settings of the whole test suite."""

import os
from importlib.metadata import version

# Nearly all of the time of the fast tests is compilation, and this makes it five times shorter. The slow tests
# run the programs that users run, except where --compile-fast says that their compilation is not what is tested.
_COMPILE_FAST = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jaxlib").startswith("0.10."):
    _COMPILE_FAST += " --xla_cpu_use_fusion_emitters=false"


def pytest_addoption(parser):
    parser.addoption(
        "--compile-fast",
        action="store_true",
        help="compile slow tests as the fast ones: without optimisation",
    )


def pytest_configure(config):
    """Sets the flags before JAX reads them; those of the environment come last and win."""
    # In interpreted GPU kernels, warpgroups that wait for each other take a thread of XLA's each.
    os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))
    if config.getoption("compile_fast") or "not slow" in config.getoption("markexpr"):
        os.environ["XLA_FLAGS"] = f"{_COMPILE_FAST} {os.environ.get('XLA_FLAGS', '')}"
