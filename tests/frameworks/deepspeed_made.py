"""Shared helpers of the tests of deepspeed."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import halfstep
from tests.frameworks.reference import Net, samples, weights

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed")
import halfstep.deepspeed  # noqa: E402


def have_it_train_on_a_cpu(patch: pytest.MonkeyPatch) -> None:
    """Make DeepSpeed train in fp16 on the CPU, which it does not support."""
    patch.setattr(type(deepspeed.get_accelerator()), "is_fp16_supported", lambda _: True)
    backend = sys.modules["deepspeed.comm.torch"]
    patch.setattr(backend, "build_shm_op", lambda: None)  # else compiled for minutes


def train(
    folder: Path | None, *, stage: int, clip: float, accumulation: int, epochs: int = 2
) -> tuple[list[Any], list[Any]]:
    """Train on this rank's batches; return the engine's report of each step."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    config = {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clip,
        "zero_optimization": {"stage": stage},
        "fp16": {
            "enabled": True,
            "initial_scale_power": 20,
            "loss_scale_window": 4,
            "hysteresis": 1,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=net, optimizer=optimizer, config=config, dist_init_required=False
    )
    if folder:
        halfstep.deepspeed.watch(engine, folder=folder)
    x, y = (each.half() for each in samples())
    result = []
    names = {parameter: name for name, parameter in engine.module.named_parameters()}
    for _ in range(epochs):
        for batch, wanted in zip(x.split(8)[rank::ranks], y.split(8)[rank::ranks], strict=True):
            loss = (engine(batch) - wanted).float().square().mean()
            engine.backward(loss)
            scale, is_step = engine.optimizer.cur_scale, engine.is_gradient_accumulation_boundary()
            found = [
                names[parameter]
                for i, group in engine.optimizer.averaged_gradients.items()
                for parameter, gradient in zip(
                    engine.optimizer.params_in_partition[i], group or [], strict=False
                )
                if not gradient.isfinite().all()
            ]
            engine.step()
            if is_step:
                result.append((scale, engine.optimizer.overflow, found))
    if folder:
        halfstep.watch().finish()
    return result, weights(engine.module)
