"""Properties of this machine that affect the bits that training computes."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np
import torch


def versions() -> dict[str, str | None]:
    """Return the versions of the software used; `cuda` is None in a CPU build."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "torchao": _version("torchao"),
    }


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def device_name(device: torch.device) -> str:
    """Return the model of a GPU, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def host_memory_bytes() -> int:
    """Return the memory of the host."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
