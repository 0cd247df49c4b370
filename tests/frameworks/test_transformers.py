"""Transformers' Trainer with `halfstep.transformers.Watch`, compared with unwatched training."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.frameworks.reference import Net, RecordingScaler, assert_true, samples, weights

transformers = pytest.importorskip("transformers")
import halfstep  # noqa: E402
import halfstep.transformers  # noqa: E402


class Trainer(transformers.Trainer):
    """A Trainer with a given scaler, which Accelerate creates on CUDA only, and fp16 autocast."""

    recording: RecordingScaler

    def create_optimizer(self, *arguments: Any) -> Any:
        """Set the scaler first."""
        self.accelerator.scaler = self.recording
        return super().create_optimizer(*arguments)

    def compute_loss(self, *arguments: Any, **named: Any) -> Any:
        """Compute the loss in fp16."""
        with torch.autocast("cpu", dtype=torch.float16):
            return super().compute_loss(*arguments, **named)

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Scale the loss, as accelerator.backward does with its own scaler."""
        model.train()
        loss = self.compute_loss(model, inputs)
        self.recording.scale(loss).backward()
        return loss.detach()


def train(folder: Path, optim: str, callbacks: list[Any]) -> tuple[RecordingScaler, list[Any]]:
    """Train two epochs."""
    net, scaler = Net(), RecordingScaler()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        optim=optim,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    x, y = samples()
    data = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
    trainer = Trainer(net, arguments, train_dataset=data, callbacks=callbacks)
    trainer.recording = scaler
    trainer.train()
    return scaler, weights(net)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_transformers_is_recorded_exactly(tmp_path: Path, optim: str) -> None:
    """Scales, skips and culprits equal the scaler's, and weights those without a watch."""
    bare, without = train(tmp_path, optim, [])
    watch = halfstep.transformers.Watch(folder=tmp_path / "runs")
    watched, with_us = train(tmp_path, optim, [watch])
    assert (watched.scales, watched.skipped) == (bare.scales, bare.skipped)
    assert all(map(torch.equal, with_us, without))
    assert_true(tmp_path / "runs", watched)
