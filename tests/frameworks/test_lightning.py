"""Lightning with `halfstep.lightning.Watch`, compared with the unwatched fit."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.reference import (
    Net,
    RecordingScaler,
    assert_true,
    read_written,
    samples,
    weights,
)

pl = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402

import halfstep  # noqa: E402
import halfstep.lightning  # noqa: E402


class Module(pl.LightningModule):
    """The network as a Lightning module."""

    def __init__(self, fused: bool, raises: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = Net()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        """Return the loss."""
        if self.hparams["raises"] and index == 3:
            raise KeyError("broken")
        x, y = batch
        return (self.net(x) - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2, fused=self.hparams["fused"])


def fit(
    folder: Path, callbacks: list[Any], *, fused: bool, clip: float | None, raises: bool = False
) -> tuple[RecordingScaler, list[torch.Tensor]]:
    """Fit once in fp16 on the CPU."""
    scaler, module = RecordingScaler(), Module(fused, raises)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler)],
        gradient_clip_val=clip,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(TensorDataset(*samples()), batch_size=8))
    return scaler, weights(module)


@pytest.mark.parametrize(("fused", "clip"), [(False, None), (False, 1.0), (True, None)])
def test_lightning_is_recorded_exactly(tmp_path: Path, fused: bool, clip: float | None) -> None:
    """Scales, skips and culprits equal the scaler's, and weights those without a watch."""
    bare, without = fit(tmp_path, [], fused=fused, clip=clip)
    watch = halfstep.lightning.Watch(folder=tmp_path / "runs")
    watched, with_us = fit(tmp_path, [watch], fused=fused, clip=clip)
    assert (watched.scales, watched.skipped) == (bare.scales, bare.skipped)
    assert all(map(torch.equal, with_us, without))
    assert_true(tmp_path / "runs", watched)


def test_what_lightning_raises_is_kept(tmp_path: Path) -> None:
    """An exception within a fit is raised as usual, and the run's outcome has the traceback."""
    watch = halfstep.lightning.Watch(folder=tmp_path / "runs", name="it")
    with pytest.raises(KeyError, match="broken"):
        fit(tmp_path, [watch], fused=False, clip=None, raises=True)
    outcome = json.loads((tmp_path / "runs" / "it" / "outcome-1.json").read_text())
    assert outcome["status"] == "failed"
    assert "KeyError: 'broken'" in outcome["error"]
    assert len(read_written(tmp_path / "runs")[0]) == 3
