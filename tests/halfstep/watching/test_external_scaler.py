"""Loops of frameworks with a loss scaler of their own."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn

import halfstep
from halfstep.deepspeed import _Place
from halfstep.telemetry.flags import SKIPPED
from halfstep.watching.external_scaler import ExternalScaler
from tests.halfstep.watching.watch_made import Written

STEPS, OVERFLOWS, SCALE = 6, 3, 1024.0


@pytest.mark.parametrize("is_partitioned", [False, True])
def test_steps_are_those_of_the_framework(tmp_path: Path, is_partitioned: bool) -> None:
    """Steps are recorded also if the framework removes gradients from parameters, as DeepSpeed's
    ZeRO does.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    parameters = list(net.parameters())
    watch = halfstep.watch(net, folder=tmp_path, name="it")
    external, guard = ExternalScaler(watch, "Adam"), watch._guard
    places = [_Place(each) for each in parameters]
    names = watch._loop.state.names
    names |= {place: names[each] for each, place in zip(parameters, places, strict=True)}
    scale, norms, losses = SCALE, [], []
    for number in range(1, STEPS + 1):
        loss = net(torch.randn(8, 4)).square().mean()
        guard(external.loss, loss)
        gradients = list(torch.autograd.grad(loss * scale, parameters))
        if number == OVERFLOWS:
            gradients[1][0] = math.inf
        for parameter, place, gradient in zip(parameters, places, gradients, strict=True):
            parameter.grad = None if is_partitioned else gradient
            place.grad = gradient
        guard(external.gradients, places if is_partitioned else parameters, scale, 1e-3)
        guard(external.on_decision, number == OVERFLOWS)
        norms.append(math.hypot(*(float(each.norm()) for each in gradients)) / scale)
        losses.append(loss.item())
        scale /= 2 if number == OVERFLOWS else 1
        guard(external.on_update, scale)
    watch.finish()
    written = Written(watch.folder)
    assert written.steps["step"].tolist() == list(range(1, STEPS + 1))
    assert (written.steps["flags"] & SKIPPED > 0).tolist() == [n == OVERFLOWS for n in range(1, 7)]
    assert written.steps["scale"].tolist() == [SCALE] * OVERFLOWS + [SCALE / 2] * 3
    assert written.steps["loss"] == pytest.approx(losses)
    assert written.steps["grad_norm"] == pytest.approx(norms)
