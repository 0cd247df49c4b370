"""A scaler's own observations within a framework's loop, as a reference for `watch`."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from halfstep.telemetry.events import Event
from halfstep.telemetry.flags import SKIPPED
from halfstep.telemetry.spool import SpoolReader
from tests.spool_made import fields_of

SAMPLES, STEPS = 96, 24


class RecordingScaler(GradScaler):
    """A scaler that records its scale, and whether it found inf or NaN, at each update.

    culprits: by step, the shapes of the gradients that are not finite, sorted.
    """

    def __init__(self, init_scale: float = 2.0**21) -> None:
        super().__init__("cpu", init_scale=init_scale, growth_interval=4)
        self.scales: list[float] = []
        self.skipped: list[bool] = []
        self.culprits: list[list[tuple[int, ...]]] = []
        self._found: list[tuple[int, ...]] = []

    def unscale_(self, optimizer: Any) -> None:
        """Record the gradients before a clip."""
        super().unscale_(optimizer)
        self._look(optimizer)

    def _check_inf_per_device(self, optimizer: Any) -> Any:
        found = super()._check_inf_per_device(optimizer)
        self._look(optimizer)
        return found

    def _look(self, optimizer: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._found += [
            tuple(p.shape) for p in parameters if p.grad is not None and not p.grad.isfinite().all()
        ]

    def update(self, new_scale: Any = None) -> None:
        """Record the update before it happens."""
        flags = [
            flag.item()
            for state in self._per_optimizer_states.values()
            for flag in state["found_inf_per_device"].values()
        ]
        self.scales.append(self._scale.item())
        self.skipped.append(any(flags))
        self.culprits.append(sorted(self._found))
        self._found = []
        super().update(new_scale)


class Net(nn.Module):
    """Two layers, whose fp16 gradients overflow at large scales."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        """Compute the output. x: (B, 8); with labels, as Transformers requires it, the loss."""
        out = self.head(torch.tanh(self.body(x)))
        return out if labels is None else {"loss": (out - labels).square().mean()}


def samples() -> tuple[Tensor, Tensor]:
    """Return the same inputs and targets each time."""
    x = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(1))
    return x, x.sum(dim=1, keepdim=True)


def weights(net: nn.Module) -> list[Tensor]:
    """Return a copy of the weights."""
    return [p.detach().clone() for p in net.parameters()]


class Training:
    """A plain fp16 loop of two layers on the CPU, one epoch at a time."""

    def __init__(self, rate: float) -> None:
        self.net, self.scaler = Net(), RecordingScaler()
        self._optimizer = torch.optim.AdamW(self.net.parameters(), lr=rate)

    def epoch(self) -> float:
        """Train over the samples once; return the last loss."""
        for x, y in zip(*(each.split(8) for each in samples()), strict=True):
            self._optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = (self.net(x) - y).square().mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self._optimizer)
            self.scaler.update()
        return loss.item()

    def equals(self, other: "Training") -> bool:
        """Return whether two trainings have the same bits, scales and skips."""
        mine, others = (weights(each.net) for each in (self, other))
        decisions = (self.scaler.scales, self.scaler.skipped)
        return decisions == (other.scaler.scales, other.scaler.skipped) and all(
            map(torch.equal, mine, others)
        )


def read_written(folder: Path) -> tuple[np.ndarray[Any, Any], list[dict[str, Any]]]:
    """Return steps and events of the only run in a folder."""
    [place] = [path for path in (folder, *folder.iterdir()) if (path / "run.json").exists()]
    reader, steps, events = SpoolReader(place / "spool"), [], []
    while items := reader.poll():
        for item in items:
            (events if isinstance(item, Event) else steps).append(fields_of(item))
    return np.concatenate(steps), events


def assert_true(folder: Path, scaler: RecordingScaler, net: nn.Module | None = None) -> None:
    """Compare scales, skips and culprits with the reference, step by step."""
    steps, events = read_written(folder)
    assert 2 <= sum(scaler.skipped) < len(scaler.skipped)
    assert steps["scale"].tolist() == scaler.scales
    assert ((steps["flags"] & SKIPPED) != 0).tolist() == scaler.skipped
    assert np.isfinite(steps["loss"]).all()
    shapes = {name: tuple(p.shape) for name, p in (net or Net()).named_parameters()}
    result = {
        event["step"]: sorted(
            shapes[each["name"].removeprefix("net.")] for each in event["culprits"]
        )
        for event in events
        if event.get("kind") == "skip"
    }
    expected = zip(steps["step"].tolist(), scaler.skipped, scaler.culprits, strict=True)
    assert result == {step: culprits for step, was_skipped, culprits in expected if was_skipped}
