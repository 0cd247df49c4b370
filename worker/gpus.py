"""Which of the machine's GPUs a worker's devices are.

CUDA counts from 0 what CUDA_VISIBLE_DEVICES leaves visible. An administrator may have given the
worker some only, by numbers, UUIDs or MIG instances: a worker's device i is the i-th of those, and
a training is given that one's own name.
"""

import os
from typing import Any

import pynvml

MASK = "CUDA_VISIBLE_DEVICES"


def environment(devices: list[int] | None = None) -> dict[str, str]:
    """Return what makes a process see these devices of the worker's, or all of them.

    Numbers mean to CUDA what they mean to NVML, unless the administrator says otherwise.
    """
    order = {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    return order if devices is None else order | {MASK: ",".join(map(_entry, devices))}


def handle(device: int) -> Any:
    """Return NVML's handle of a worker's device. Raises NVMLError."""
    entry = _entry(device)
    if entry.isdecimal():
        return pynvml.nvmlDeviceGetHandleByIndex(int(entry))
    return pynvml.nvmlDeviceGetHandleByUUID(entry)


def _entry(device: int) -> str:
    mask = os.environ.get(MASK)
    return str(device) if mask is None else mask.split(",")[device].strip()
