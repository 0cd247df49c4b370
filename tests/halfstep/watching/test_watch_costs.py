"""Costs of watching a step: no wait, and a fixed number of operations."""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import halfstep
from halfstep.recording.gradients import Gradients
from halfstep.watching.row_writer import RowWriter
from halfstep.watching.scaler_calls import ScalerCalls
from tests.diagnosis.trial import unreadable
from tests.marks import extended, sampled
from tests.operators import Operators

META = torch.device("meta")


def step(net: nn.Module, optimizer: Any, scaler: GradScaler, clip: bool, device: str) -> None:
    """Train one step, with or without a clip."""
    optimizer.zero_grad()
    scaler.scale(net(torch.ones(4, 8, device=device)).square().mean()).backward()
    if clip:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()


@pytest.fixture
def on_meta(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Allow fused optimizers for tensors on the meta device."""
    supported = torch.utils._foreach_utils._get_fused_kernels_supported_devices()
    monkeypatch.setattr(
        sys.modules["torch.optim.optimizer"],  # torch.optim hides it behind a name
        "_get_fused_kernels_supported_devices",
        lambda: [*supported, "meta"],
    )
    monkeypatch.setattr("halfstep.recording.ring.DRAIN_SECONDS", 1e9)  # what comes then needs CUDA
    monkeypatch.setattr("halfstep.recording.ring.EAGER_ROWS", 0)
    yield
    if halfstep.session.active_run.active is not None:
        # Rows of the meta device have nothing to hand over.
        halfstep.session.active_run.active._loop.rows.recorder = None
        halfstep.session.active_run.active.finish()


def train_on_meta(folder: Path, *, clip: bool, every: int = 0) -> Any:
    """Watch three steps with unreadable values. every: interval of all measurements."""
    net = nn.Linear(8, 1, device=META)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = GradScaler("cpu")
    watch = halfstep.watch(
        net,
        folder=folder,
        name="it",
        histogram_every=every,
        layers_every=every,
        headroom_every=every,
    )
    for _ in range(3):
        step(net, optimizer, scaler, clip, "meta")
        watch.log({"number": 1.0})
    return watch


@pytest.mark.parametrize("every", [0, 1])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.usefixtures("on_meta", "nothing_compiled")
def test_a_watched_step_never_waits_for_the_device(
    tmp_path: Path, clip: bool, every: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A watched step reads no value of a device: on the meta device each read would raise."""
    watch = train_on_meta(tmp_path, clip=clip, every=every)
    assert watch._run.guard.is_on
    assert watch.step == 3
    if every:
        # A histogram and a headroom in each of three steps.
        assert len(watch._loop.state.diagnoses._host_copies.sent) == 6
        watch._loop.state.diagnoses._host_copies.sent.clear()
    assert capsys.readouterr().err.count("halfstep:") == 1


@pytest.mark.parametrize(
    ("owner", "place"), [(Gradients, "norms"), (RowWriter, "write"), (ScalerCalls, "on_update")]
)
@pytest.mark.parametrize("ask", ["item", *extended(["cpu", "tolist"])])
@pytest.mark.usefixtures("on_meta")
def test_the_guard_sees_a_wait(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    place: str,
    ask: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A value read at any of these points ends the watch, or the recording of its figure."""
    original = getattr(owner, place)

    def asking(*arguments: Any, **named: Any) -> Any:
        getattr(torch.ones((), device=META), ask)()
        return original(*arguments, **named)

    monkeypatch.setattr(owner, place, asking)
    is_on = train_on_meta(tmp_path, clip=True)._run.guard.is_on
    assert not is_on or "gradient norms of AdamW: no longer recorded" in capsys.readouterr().err


WARM = 130  # steps until a loop is known
DTYPES = {True: torch.float16, False: torch.bfloat16}  # by whether the loss is scaled
OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(torch.optim.SGD, lr=1e-3),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3),
    "fused AdamW": partial(torch.optim.AdamW, lr=1e-3, fused=True),
}


class Training:
    """A loop of layers with two parameters each."""

    def __init__(self, optimizer: str, parameters: int, *, is_scaled: bool, clip: bool) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4) for _ in range(parameters // 2)]
        self.net, self.clip = nn.Sequential(*layers), clip
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        self.scaler = GradScaler("cpu", init_scale=8.0, enabled=is_scaled)
        self.dtype = DTYPES[is_scaled]

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=self.dtype):
            loss = self.net(torch.ones(2, 4)).square().mean()
        self.scaler.scale(loss).backward()
        if self.clip:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def operators(self) -> Counter[str]:
        """Return the number of operators in a step."""
        for _ in range(WARM):
            self.step()
        with Operators() as operators:
            self.step()
        return operators.counts


#: Each value with most of the others; all combinations run in `make test-all`.
SAMPLE = [
    (100, False, "SGD", True, True),
    (6, False, "AdamW", False, True),
    (6, True, "AdamW", True, False),
    (6, True, "fused AdamW", False, True),
]
COMBINATIONS = product([6, 100], [True, False], OPTIMIZERS, [False, True], [False, True])


@pytest.mark.parametrize(
    ("parameters", "is_scaled", "optimizer", "is_on_device", "clip"),
    sampled(COMBINATIONS, SAMPLE),
)
@pytest.mark.slow
def test_a_step_takes_two_operators_more_and_one_with_a_clip(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parameters: int,
    is_scaled: bool,
    optimizer: str,
    is_on_device: bool,
    clip: bool,
) -> None:
    """A watched step takes two more operators, for norms and row; with a clip it takes one."""
    monkeypatch.setattr("halfstep.recording.ring.DRAIN_SECONDS", 1e9)
    bare = Training(optimizer, parameters, is_scaled=is_scaled, clip=clip).operators()
    with (
        unreadable() if is_on_device else nullcontext(),
        halfstep.watch(folder=tmp_path, name="it") as watch,
    ):
        watched = Training(optimizer, parameters, is_scaled=is_scaled, clip=clip)
        watch.add(watched.net)
        surplus = watched.operators()
        assert watch.step == WARM + 1
    surplus.subtract(bare)
    norms = {} if clip else {"aten._foreach_norm": 1}
    assert {name: count for name, count in surplus.items() if count} == {"aten.stack": 1, **norms}
