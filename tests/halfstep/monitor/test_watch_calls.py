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
from halfstep.monitor import hooks, loop
from halfstep.monitor.usual_steps import CLOSED, OFF, PASSED, SCALED, UPDATING

STEPS = 20
USUAL = {"scaled", "begins", "checked", "updating", "updated"}
MOST_CALLS = 19  # of functions of halfstep, in a step that is applied
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


def test_an_applied_step_takes_no_guarded_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step like all before it is recorded by UsualSteps."""
    monkeypatch.setattr("halfstep.monitor.ring.DRAIN_SECONDS", 1e6)
    calls = calls_of_steps(tmp_path)
    assert calls["Watch._protected"] == 0
    assert {name for name in USUAL if calls[f"UsualSteps.{name}"] == STEPS} == USUAL
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


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *(("scaled", 3), ("begins", 1), ("checked", 3), ("unscaled", 3)),
        *(("clips", 0), ("updating", 1), ("updated", 1)),
    ],
)
def test_usual_steps_leave_other_objects_to_the_loop(name: str, arguments: int) -> None:
    """In every stage, a call with objects of another loop is not recorded, and raises nothing."""
    listener = loop.Loop(lambda _: None, lambda _: None)
    for stage in (OFF, CLOSED, SCALED, PASSED, UPDATING):
        listener.usual.stage = stage
        assert not getattr(listener.usual, name)(*(object() for _ in range(arguments)))
        assert listener.usual.stage == stage


@pytest.mark.parametrize("name", hooks.UNGUARDED)
def test_unguarded_calls_raise_nothing(name: str) -> None:
    """A scaler or optimizer of any kind costs no training."""
    listener = loop.Loop(lambda _: None, lambda _: None)
    getattr(listener, name)(object())
