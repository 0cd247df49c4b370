"""Workload of a step: examples, tokens, operations, and the peak rate of its devices.

Peaks are dense tensor-core rates from NVIDIA's data sheets, which print twice as much for sparse
matrices. For unlisted devices no utilisation is reported.
"""

import re

import torch

from halfstep.recipe import Recipe
from halfstep.run_config import RunConfig
from halfstep.telemetry.events import Event, Workload
from trainer.machine import device_name

#: TFLOP/s by device: in fp16, bf16, TF32 and fp32. None: not in hardware.
PEAKS: dict[str, tuple[float, float | None, float | None, float]] = {
    # https://images.nvidia.com/content/technologies/volta/pdf/volta-v100-datasheet-update-us-1165301-r5.pdf
    r"Tesla V100-SXM2.*": (125.0, None, None, 15.7),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/tesla-t4/t4-tensor-core-datasheet-951643.pdf
    r"Tesla T4": (65.0, None, None, 8.1),
    # https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-nvidia-us-2188504-web.pdf
    r"NVIDIA A100.*": (312.0, 312.0, 156.0, 19.5),
    # https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet
    r"NVIDIA H100 80GB HBM3": (989.4, 989.4, 494.7, 66.9),
    r"NVIDIA H100 PCIe": (756.0, 756.0, 378.0, 51.0),
    # https://resources.nvidia.com/en-us-data-center-overview/hpc-datasheet-sc23-h200
    r"NVIDIA H200": (989.0, 989.0, 494.5, 67.0),
    # https://resources.nvidia.com/en-us-data-center-overview/l4-gpu-datasheet
    r"NVIDIA L4": (121.0, 121.0, 60.0, 30.3),
}


def workload(recipe: Recipe, config: RunConfig, device: torch.device, devices: int) -> Event:
    """Return the workload event. devices: over all ranks."""
    training = config.training
    examples = training.batch_size * training.accumulation_steps * devices
    tokens, flops = recipe.tokens_per_example, recipe.flops()
    peak = peak_flops(device_name(device), config) if flops is not None else None
    return Workload(
        step=0,
        examples=examples,
        tokens=None if tokens is None else examples * tokens,
        flops=None if flops is None else float(examples * flops),
        peak_flops=None if peak is None else peak * devices,
        device=device_name(device) if device.type == "cuda" else device.type,
    )


def peak_flops(name: str, config: RunConfig) -> float | None:
    """Return a device's peak operations per second, in the precision of its matrix products."""
    for pattern, (fp16, bf16, tf32, fp32) in PEAKS.items():
        if re.fullmatch(pattern, name):
            plain = tf32 if config.training.tf32 else fp32
            tera = {"fp16": fp16, "bf16": bf16, "fp32": plain}.get(config.precision)
            return None if tera is None else tera * 1e12
    return None
