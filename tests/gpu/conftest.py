"""Tests that need a CUDA device: `make gpu-tests`. Without one each is skipped with a reason."""

import os

import pytest
import torch

from tests.gpu.device import DEVICE
from tests.trainer.conftest import run_loop  # noqa: F401 - a fixture

# Deterministic matrix products need it, and read it as CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    devices = 1 if DEVICE.type == "cpu" else torch.cuda.device_count()
    for item in items:
        if "gpu" not in item.path.parts:
            continue
        wanted = 2 if item.get_closest_marker("two_devices") else 1
        if devices < wanted:
            reason = f"needs {wanted} CUDA device(s), has {devices}: make gpu-tests"
            item.add_marker(pytest.mark.skip(reason=reason))
