"""Tokens per second, time waiting for data, and the share of the devices' peak that the model's operations take (MFU)."""

import contextlib
import time
from collections.abc import Iterator

import jax

# Dense bfloat16 operations per second of one JAX device, by device kind.
# TPU: "Peak compute per chip (bf16)" at docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e.
# NVIDIA: "BFLOAT16 Tensor Core" without sparsity, data sheets of A100, H100 SXM and H200.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}


class Pace:
    """The pace of the steps since the last call of `restart` or `measure`.

    Args:
      step: the last that was done.
    """

    def __init__(self, step: int):
        self._peak = jax.device_count() * PEAK_FLOPS.get(jax.devices()[0].device_kind, 0)
        self.restart(step)

    def restart(self, step: int) -> None:
        """Leaves out what lies before, an evaluation for example."""
        self._step, self._clock, self._waited = step, time.monotonic(), 0.0

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Around what waits for data."""
        start = time.monotonic()
        yield
        self._waited += time.monotonic() - start

    def measure(self, step: int, tokens_per_step: float, flops_per_step: float) -> dict[str, float]:
        """What a row of metrics says of the steps up to this one, which is finished."""
        steps = step - self._step
        seconds = (time.monotonic() - self._clock) / steps
        measured = {
            "wall/tokens_per_second": tokens_per_step / seconds,
            "wall/data_seconds_per_step": self._waited / steps,
        }
        if self._peak:
            measured["wall/mfu"] = flops_per_step / seconds / self._peak
        self.restart(step)
        return measured
