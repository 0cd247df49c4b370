"""What a scaler itself sees in a framework's loop: the truth that `watch` is held against."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from halfstep.spool import SKIPPED, SpoolReader

SAMPLES, STEPS = 96, 24


class RecordingScaler(GradScaler):
    """Writes down, at each update, its scale and whether anything was found; it waits for that."""

    def __init__(self) -> None:
        super().__init__("cpu", init_scale=2.0**21, growth_interval=4)
        self.scales: list[float] = []
        self.skipped: list[bool] = []

    def update(self, new_scale: Any = None) -> None:
        """Write them down first."""
        flags = [
            flag.item()
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        self.scales.append(self._scale.item())
        self.skipped.append(any(flags))
        super().update(new_scale)


class Net(nn.Module):
    """Two layers; in fp16 its gradients overflow at large scales."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        """x: (B, 8); with labels, as Transformers wants it, the loss."""
        out = self.head(torch.tanh(self.body(x)))
        return out if labels is None else {"loss": (out - labels).square().mean()}


def samples() -> tuple[Tensor, Tensor]:
    """Return inputs and targets, the same each time."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return x, x.sum(dim=1, keepdim=True)


def weights(net: nn.Module) -> list[Tensor]:
    """Return the weights as they are now."""
    return [p.detach().clone() for p in net.parameters()]


def written(folder: Path) -> tuple[np.ndarray[Any, Any], list[dict[str, Any]]]:
    """Return the steps and events of the one run in there."""
    [place] = [path for path in folder.iterdir() if (path / "run.json").exists()]
    reader, steps, events = SpoolReader(place / "spool"), [], []
    while items := reader.poll():
        for item in items:
            (events if isinstance(item, dict) else steps).append(item)
    return np.concatenate(steps), events


def assert_true(folder: Path, scaler: RecordingScaler) -> None:
    """Compare scales, skips and culprits with the reference's, step by step."""
    steps, events = written(folder)
    assert 2 <= sum(scaler.skipped) < len(scaler.skipped)
    assert steps["scale"].tolist() == scaler.scales
    assert ((steps["flags"] & SKIPPED) != 0).tolist() == scaler.skipped
    assert np.isfinite(steps["loss"]).all()
    skips = [event for event in events if event.get("kind") == "skip"]
    assert len(skips) == sum(scaler.skipped)
    names = {name for name, _ in Net().named_parameters()}
    for skip in skips:
        culprits = {culprit["name"].removeprefix("net.") for culprit in skip["culprits"]}
        assert culprits
        assert culprits <= names
