"""Device of these tests: the first CUDA device, or a CPU to try the tests out.

HALFSTEP_GPU_TESTS_DEVICE=cpu runs those that do not need CUDA itself.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

DEVICE = torch.device(os.environ.get("HALFSTEP_GPU_TESTS_DEVICE", "cuda:0"))
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason=f"needs CUDA itself, not {DEVICE}")


@contextmanager
def sync_debug_mode(mode: str) -> Iterator[None]:
    """Let PyTorch "warn" of each wait for the device, or raise an "error"; a CPU has none."""
    if DEVICE.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def rng_state() -> torch.Tensor:
    """Return the state of the device's generator."""
    return torch.cuda.get_rng_state(DEVICE) if DEVICE.type == "cuda" else torch.get_rng_state()
