"""Mapping of a worker's devices to the machine's GPUs.

CUDA numbers the visible devices from 0. An administrator may restrict the worker by
CUDA_VISIBLE_DEVICES to numbers, UUIDs or MIG instances: a worker's device i is the i-th of those,
and a training gets that entry.
"""

import os

from halfstep.sidecar.system import MASK, mask_entry


def environment(devices: list[int] | None = None) -> dict[str, str]:
    """Return variables that make these of the worker's devices visible, by default all.

    CUDA and NVML use the same numbers, unless the administrator sets another order.
    """
    order = {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}
    return order if devices is None else order | {MASK: ",".join(map(mask_entry, devices))}
