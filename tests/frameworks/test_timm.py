"""timm's NativeScaler with plain `halfstep.watch`, compared with the unwatched loop."""

from pathlib import Path

import pytest
import torch

import halfstep
from tests.frameworks.reference import Net, RecordingScaler, assert_true, samples, weights

timm_utils = pytest.importorskip("timm.utils")
timm_optim = pytest.importorskip("timm.optim")


def train(clip: float | None, folder: Path | None) -> tuple[RecordingScaler, list[torch.Tensor]]:
    """Train as timm's train.py does, by one call of the scaler."""
    net, scale = Net(), timm_utils.NativeScaler(device="cpu")
    scale._scaler = scaler = RecordingScaler()
    optimizer = timm_optim.create_optimizer_v2(net, "adamw", lr=1e-2)
    x, y = samples()
    if folder:
        halfstep.watch(net, folder=folder)
    for _ in range(2):
        for batch, wanted in zip(x.split(8), y.split(8), strict=True):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (net(batch) - wanted).square().mean()
            scale(loss, optimizer, clip_grad=clip, parameters=net.parameters())
    if folder:
        halfstep.watch().finish()
    return scaler, weights(net)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_timm_is_recorded_exactly(tmp_path: Path, clip: float | None) -> None:
    """Scales, skips and culprits equal the scaler's, and weights those without `watch`."""
    bare, without = train(clip, None)
    watched, with_us = train(clip, tmp_path)
    assert (watched.scales, watched.skipped) == (bare.scales, bare.skipped)
    assert all(map(torch.equal, with_us, without))
    assert_true(tmp_path, watched)
