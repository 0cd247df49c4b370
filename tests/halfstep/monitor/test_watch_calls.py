"""Calls in a watched step: its cost without a clock."""

import sys
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

import halfstep
from halfstep.monitor import loop

STEPS = 20
MOST_CALLS = 48  # of functions of halfstep, in a step that is applied
OURS = str(Path(halfstep.__file__).parent)


def calls_of_steps(folder: Path) -> Counter[str]:
    """Count the calls of halfstep's functions in applied steps, rows being handed over later."""
    net = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    scaler = GradScaler("cpu", init_scale=8.0)
    calls: Counter[str] = Counter()

    def count(frame: types.FrameType, event: str, _argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS):
            calls[frame.f_code.co_qualname] += 1

    with halfstep.watch(net, folder=folder) as watch:
        for step in range(-150, STEPS):  # a loop's first passes are looked at more closely
            if step == 0:
                watch._loop.drain(1.0)
                sys.setprofile(count)
            optimizer.zero_grad()
            scaler.scale(net(torch.ones(4, 3)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
        sys.setprofile(None)
    return calls


def test_an_applied_step_takes_few_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loop whose steps are alike."""
    monkeypatch.setattr("halfstep.recording.ring.DRAIN_SECONDS", 1e6)
    calls = calls_of_steps(tmp_path)
    assert sum(calls.values()) <= STEPS * MOST_CALLS


def test_a_step_without_an_optimizer_raises_as_unwatched(tmp_path: Path) -> None:
    """Unguarded wrappers accept any arguments."""
    scaler = GradScaler("cpu", init_scale=8.0)
    with pytest.raises(TypeError) as unwatched:
        scaler.step()  # type: ignore[call-arg]
    with halfstep.watch(nn.Linear(2, 1), folder=tmp_path) as watch:
        with pytest.raises(TypeError) as watched:
            scaler.step()  # type: ignore[call-arg]
        assert watch._is_on
    assert str(watched.value) == str(unwatched.value)


def test_an_unguarded_call_raises_nothing() -> None:
    """Roots of any kind cost no training."""
    listener = loop.Loop(lambda _: None, lambda _: None)
    assert not listener.passes.repeats(object())
