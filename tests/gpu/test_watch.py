"""On a GPU `halfstep.watch` keeps the script's numbers and adds no wait for the device."""

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep
from halfstep.shadow import armed_steps
from tests.gpu.device import DEVICE, sync_debug_mode
from tests.halfstep.watching.watch_made import SCRIPTS, Written, equals_the_reference_loop

WAIT = "called a synchronizing CUDA operation"
STEPS = 700  # more than a round of the ring of rows
WARM_UP = 20  # steps: libraries start, which may wait, and some early steps are armed


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start no sidecar, and arm the early steps at once."""
    monkeypatch.setattr(armed_steps, "FREE_SECONDS", math.inf)
    monkeypatch.setenv("HALFSTEP_CONSOLE", "no")
    monkeypatch.setenv("HALFSTEP_SYSTEM", "no")


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_step_is_the_reference_loops(tmp_path: Path, name: str) -> None:
    """Losses, scales, skips and culprits equal the reference loop's, and weights bit for bit."""
    equals_the_reference_loop(replace(SCRIPTS[name], device=DEVICE.type), tmp_path)


class Loop:
    """A loop that never reads a number."""

    def __init__(self, *, fused: bool, clip: bool, precision: str) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8)]
        self.net = nn.Sequential(*layers).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3, fused=fused)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.999**step)
        is_scaled = precision == "fp16"
        # The scale reaches its limit within the steps: some are skipped.
        self.scaler = torch.amp.GradScaler(
            DEVICE.type, init_scale=2.0**20, growth_interval=20, enabled=is_scaled
        )
        self.clip, self.dtype = clip, torch.float16 if is_scaled else torch.bfloat16
        self.x, self.y = torch.randn(32, 64, device=DEVICE), torch.randn(32, 8, device=DEVICE)

    def step(self) -> None:
        """Train on the only batch."""
        with torch.autocast(DEVICE.type, self.dtype):
            loss = nn.functional.mse_loss(self.net(self.x), self.y)
        self.scaler.scale(loss).backward()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        self.optimizer.zero_grad()


def waits(step: Callable[[], None]) -> int:
    """Return how often the host waited for the device, by PyTorch's debug mode."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sync_debug_mode("warn"):
            for _ in range(STEPS):
                step()
    return sum(WAIT in str(each.message) for each in caught)


ALL_DIAGNOSES = {"histogram_every": 1, "layers_every": 1, "headroom_every": 1}


@pytest.mark.parametrize("options", [{}, ALL_DIAGNOSES], ids=["plain", "all diagnoses"])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_watching_adds_no_wait(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, int],
    fused: bool,
    clip: bool,
    precision: str,
) -> None:
    """The host waits as often as without watching, and all steps are recorded.

    Only armed steps wait, of which there are none after the early ones.
    """
    monkeypatch.setattr(armed_steps, "SECOND_LOOK", math.inf)
    bare, watched = (Loop(fused=fused, clip=clip, precision=precision) for _ in range(2))
    for _ in range(WARM_UP):
        bare.step()
    # A scaler passes a fused optimizer its flag; for others it reads it once a step.
    own = waits(bare.step)
    assert own == (0 if fused or precision == "bf16" or DEVICE.type == "cpu" else STEPS)
    with halfstep.watch(watched.net, folder=tmp_path, name="it", **options):
        for _ in range(WARM_UP):
            watched.step()
        assert waits(watched.step) == own
    steps = Written(tmp_path / "it").steps
    assert steps["step"].tolist() == list(range(1, STEPS + WARM_UP + 1))
    assert all(map(torch.equal, watched.net.parameters(), bare.net.parameters()))
