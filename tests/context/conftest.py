"""Processes with several virtual devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import _COMPILE_FAST as COMPILE_FAST

ROOT = Path(__file__).parents[2]
# Else XLA ends the process where a device waits long for others, which share its cores here.
_PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds=600"


@pytest.fixture(scope="session")
def on_devices():
    """Runs Python with so many virtual devices; -> what it prints."""

    def run(num_devices, *arguments, compile_flags=COMPILE_FAST):
        flags = f"{os.environ.get('XLA_FLAGS', '')} {compile_flags} {_PATIENCE}"
        flags += f" --xla_force_host_platform_device_count={num_devices}"
        process = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True,
            text=True,
            timeout=1200,
            cwd=ROOT,
            env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
        )
        assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
        return process.stdout

    return run
