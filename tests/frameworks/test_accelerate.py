"""Accelerate with plain `halfstep.watch`, compared with the unwatched loop."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import halfstep
from tests.frameworks.reference import (
    Net,
    RecordingScaler,
    assert_true,
    read_written,
    samples,
    weights,
)

accelerate = pytest.importorskip("accelerate")


def train(
    fused: bool, clip: bool, folder: Path | None, named: bool = False
) -> tuple[RecordingScaler, list]:
    """Train two epochs as Accelerate's documentation does, with a schedule."""
    accelerator = accelerate.Accelerator(cpu=True)
    accelerator.scaler = scaler = RecordingScaler()  # which it makes only on CUDA
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    loader = DataLoader(TensorDataset(*samples()), batch_size=8)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
    optimizer.scaler = scaler
    if folder:
        halfstep.watch(net, folder=folder, optimizers=[optimizer] if named else None)
    for _ in range(2):
        for x, y in loader:
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (net(x) - y).square().mean()
            scaler.scale(loss).backward()
            if clip:
                accelerator.unscale_gradients()
                torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    if folder:
        halfstep.watch().finish()
    return scaler, weights(net)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(("fused", "clip"), [(False, False), (False, True), (True, False)])
def test_accelerate_is_recorded_exactly(
    tmp_path: Path, fused: bool, clip: bool, named: bool
) -> None:
    """Skips that Accelerate misses are recorded, and so is its schedule that runs ahead.

    named: whether `watch` gets the prepared optimizer.
    """
    bare, without = train(fused, clip, None)
    watched, with_us = train(fused, clip, tmp_path, named)
    assert (watched.scales, watched.skipped) == (bare.scales, bare.skipped)
    assert all(map(torch.equal, with_us, without))
    assert_true(tmp_path, watched)
    events = read_written(tmp_path)[1]
    assert {event["optimizer"] for event in events if event.get("kind") == "skip"} == {"AdamW"}
    result = [event for event in events if event["event"] == "schedule"]
    assert bool(result) == (fused and sum(watched.skipped) >= 3)
