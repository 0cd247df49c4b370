"""Training loops as users write them, and what `watch` recorded of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import halfstep
from halfstep.telemetry.events import Event
from halfstep.telemetry.spool import SpoolReader
from tests.spool_made import fields_of

STEPS = 40


@dataclass
class Truth:
    """The reference: values that a loop observes itself, synchronously."""

    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[set[str]] = field(default_factory=list)  # optimizers, by step
    norms: list[float] = field(default_factory=list)  # of the last optimizer, before a clip
    culprits: list[dict[str, list[str]]] = field(default_factory=list)  # by step and optimizer
    weights: list[Tensor] = field(default_factory=list)


class Net(nn.Module):
    """Two layers; in fp16 its gradients overflow at large scales."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Compute the output. x: (B, 8)."""
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


@dataclass(frozen=True)
class Script:
    """A training loop. optimizers: the modules that each one trains."""

    fused: bool = False
    clip: float | None = None
    accumulation: int = 1
    optimizers: Sequence[Sequence[str]] = (("body", "head"),)
    scalers: int = 1
    kind: str = "AdamW"
    device: str = "cpu"

    def train(
        self, watch: Callable[[nn.Module], Any] = lambda _: None, *, steps: int = STEPS
    ) -> Truth:
        """Train, and return the reference values. watch: called before the first step."""
        torch.manual_seed(0)
        with torch.device(self.device):
            net = Net()
        names = {p: n for n, p in net.named_parameters()}
        optimizers = [
            getattr(torch.optim, self.kind)(
                [p for part in parts for p in getattr(net, part).parameters()],
                lr=1e-2,
                fused=self.fused,
            )
            for parts in self.optimizers
        ]
        called = [f"{self.kind}{i + 1 if i else ''}" for i in range(len(optimizers))]
        scalers = [
            torch.amp.GradScaler(self.device, init_scale=2.0**18, growth_interval=6)
            for _ in range(self.scalers)
        ]
        watch(net)
        truth = Truth()
        generator = torch.Generator("cpu").manual_seed(1)
        for _ in range(steps):
            total = 0.0
            for optimizer in optimizers:
                optimizer.zero_grad()
            for _ in range(self.accumulation):
                x = torch.randn(16, 8, generator=generator, device="cpu").to(self.device)
                with torch.autocast(self.device, dtype=torch.float16):
                    loss = (net(x) - x.sum(dim=1, keepdim=True)).square().mean()
                total += loss.item()
                loss = loss / self.accumulation
                for i, scaler in enumerate(scalers):
                    scaler.scale(loss).backward(retain_graph=i + 1 < len(scalers))
            for i, scaler in enumerate(scalers):
                own = optimizers if len(scalers) == 1 else [optimizers[i]]
                truth.scales.append(scaler.get_scale())
                truth.losses.append(total / self.accumulation)
                culprits = {}
                for optimizer in own:
                    if self.clip is not None:
                        scaler.unscale_(optimizer)
                    parameters = [p for group in optimizer.param_groups for p in group["params"]]
                    culprits[called[optimizers.index(optimizer)]] = [
                        names[p] for p in parameters if not p.grad.isfinite().all()
                    ]
                    gradients = [p.grad for p in parameters if p.grad is not None]
                    truth.norms.append(nn.utils.get_total_norm(gradients).item())
                    if self.clip is not None:
                        nn.utils.clip_grad_norm_(parameters, self.clip)
                    scaler.step(optimizer)
                truth.skipped.append(
                    {
                        called[i]
                        for i, optimizer in enumerate(optimizers)
                        if any(
                            bool(flag)
                            for flag in scaler._per_optimizer_states[id(optimizer)][
                                "found_inf_per_device"
                            ].values()
                        )
                    }
                )
                truth.culprits.append({name: culprits[name] for name in truth.skipped[-1]})
                scaler.update()
        truth.weights = [p.detach().clone() for p in net.parameters()]
        return truth


SCRIPTS = {
    "unfused": Script(),
    "fused": Script(fused=True),
    "clipped": Script(clip=1.0),
    "fused and clipped": Script(fused=True, clip=1.0),
    "SGD": Script(kind="SGD"),
    "fused SGD": Script(kind="SGD", fused=True),
    "accumulating": Script(accumulation=3, clip=1.0),
    "accumulating, fused": Script(accumulation=3, fused=True),
    "two optimizers": Script(optimizers=(("body",), ("head",)), clip=1.0),
    "two optimizers, fused": Script(optimizers=(("body",), ("head",)), fused=True),
    "two scalers": Script(optimizers=(("body",), ("head",)), scalers=2),
}


class Written:
    """The recorded contents of a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.steps: NDArray[Any]
        self.events: list[dict[str, Any]] = []
        reader, steps = SpoolReader(folder / "spool"), []
        while items := reader.poll():
            for item in items:
                if isinstance(item, np.ndarray):
                    steps.append(item)
                else:
                    assert isinstance(item, Event), item
                    self.events.append(fields_of(item))
        self.steps = np.concatenate(steps) if steps else np.zeros(0)

    def of(self, event: str, kind: str | None = None) -> list[dict[str, Any]]:
        """Return events of a kind."""
        result = [each for each in self.events if each["event"] == event]
        return [each for each in result if kind is None or each["kind"] == kind]

    def truth(self) -> Truth:
        """Return the records in the reference's form, without weights."""
        truth = Truth(self.steps["loss"].tolist(), self.steps["scale"].tolist())
        for step in self.steps["step"].tolist():
            skips = {e["optimizer"]: e for e in self.of("scaler", "skip") if e["step"] == step}
            truth.skipped.append(set(skips))
            truth.culprits.append(
                {name: [c["name"] for c in e["culprits"]] for name, e in skips.items()}
            )
        return truth


def equals_the_reference_loop(script: Script, folder: Path) -> None:
    """Assert that a watched loop trains as an unwatched one, and that its steps are recorded."""
    bare = script.train()
    assert 3 <= sum(map(bool, bare.skipped)) <= len(bare.skipped) - 3
    with halfstep.watch(folder=folder, name="it") as watch:
        watched = script.train(watch.add)
    written = Written(folder / "it").truth()
    assert all(map(torch.equal, watched.weights, bare.weights))
    assert written.scales == bare.scales == watched.scales
    assert written.skipped == bare.skipped
    assert written.culprits == bare.culprits
    assert written.losses == pytest.approx(bare.losses, rel=1e-6)
