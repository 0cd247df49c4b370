"""Costs of a watched step in calls, measured without a clock."""

import sys
import types
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import halfstep
from halfstep.watching import loop
from tests.diagnosis.trial import unreadable
from tests.marks import extended

STEPS = 20
MOST_CALLS = 25  # of functions of halfstep, in a step that is applied
OURS = str(Path(halfstep.__file__).parent)


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("clip", [True, False])
@pytest.mark.parametrize("is_on_device", [False, *extended([True])])
def test_an_applied_step_takes_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_scaled: bool, clip: bool, is_on_device: bool
) -> None:
    """A watched step takes a limited number of Python calls while no rows are delivered."""
    monkeypatch.setattr("halfstep.recording.ring.DRAIN_SECONDS", 1e6)
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    calls: Counter[str] = Counter()

    def count(frame: types.FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            calls[frame.f_code.co_qualname] += 1

    with (
        unreadable() if is_on_device else nullcontext(),
        halfstep.watch(net, folder=tmp_path) as watch,
    ):
        for step in range(-150, STEPS):  # a loop's first passes are looked at more closely
            if step == 0:
                watch._loop.drain(1.0)
                sys.setprofile(count)
            optimizer.zero_grad()
            loss = net(torch.ones(4, 3)).square().mean()
            (scaler.scale(loss) if is_scaled else loss).backward()
            if is_scaled and clip:
                scaler.unscale_(optimizer)
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            if is_scaled:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
        sys.setprofile(None)
    assert STEPS <= sum(calls.values()) <= STEPS * MOST_CALLS


def test_a_step_without_an_optimizer_raises_as_unwatched(tmp_path: Path) -> None:
    """A step without an optimizer raises as unwatched, since wrappers accept any arguments."""
    scaler = GradScaler("cpu", init_scale=8.0)
    with pytest.raises(TypeError) as unwatched:
        scaler.step()  # type: ignore[call-arg]
    with halfstep.watch(nn.Linear(2, 1), folder=tmp_path) as watch:
        with pytest.raises(TypeError) as watched:
            scaler.step()  # type: ignore[call-arg]
        assert watch._run.guard.is_on
    assert str(watched.value) == str(unwatched.value)


def test_an_unguarded_call_raises_nothing() -> None:
    """An unguarded call with any kind of root raises nothing."""
    listener = loop.Loop(lambda _: None, lambda _: None)
    assert not listener.passes.repeats(object())
