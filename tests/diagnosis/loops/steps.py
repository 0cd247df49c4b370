"""Clips, steps and updates in the wrong order, twice, or not at all."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tests.diagnosis.parts import (
    ConvNet,
    TinyGPT,
    autocast,
    draw_labelled,
    grad_scaler,
    mlp,
    tokens,
)
from tests.diagnosis.registry import PRECISION, SCALE, WatchCall, loop

CLIP = {*SCALE, *PRECISION, "lower_rate", "eps", "restore", "zero_grad"}
OUTSIDE = {*SCALE, *PRECISION, "lower_rate", "eps", "restore", "zero_grad", "clip"}


@loop(
    cause="scaled_gradients_clipped",
    harmful=CLIP,
    variants=[{"fused": False}, {"fused": True}, {"growth": 10}],
)
def clip_before_unscale(watch: WatchCall, fused: bool = False, growth: int = 2000) -> None:
    """clip_grad_norm_ while gradients are times the scale, by a name that was imported before."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = grad_scaler(2.0**12, growth)
    watch(net, name="clip")
    for x, y in draw_labelled(100):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@loop(cause="scaled_gradients_clipped", harmful=CLIP)
def clip_of_one_in_two(watch: WatchCall) -> None:
    """Two optimizers; only the first one's gradients are unscaled before the clip."""
    body, head = mlp(8, 32, 16), nn.Linear(16, 4)
    net = nn.Sequential(body, nn.ReLU(), head)
    first = torch.optim.AdamW(body.parameters(), lr=1e-3)
    second = torch.optim.SGD(head.parameters(), lr=0.05)
    scaler = grad_scaler()
    watch(net, name="one in two")
    for x, y in draw_labelled(80):
        first.zero_grad()
        second.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(first)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(first)
        scaler.step(second)
        scaler.update()


@loop(cause="scaled_gradients_clipped", harmful=CLIP, variants=[{"fused": False}, {"fused": True}])
def clip_by_hand(watch: WatchCall, fused: bool = False) -> None:
    """The norm is brought to 1 by a loop over the gradients, before they are unscaled."""
    net = ConvNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=fused)
    scaler = grad_scaler(2.0**8, growth_interval=8)
    watch(net, name="by hand")
    for x, y in draw_labelled(100, (1, 8, 8)):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        if norm > 1.0:
            for gradient in gradients:
                gradient.mul_(1.0 / norm)
        scaler.step(optimizer)
        scaler.update()


@loop(cause="scaled_gradients_clipped", harmful=CLIP)
def clip_with_accumulation(watch: WatchCall) -> None:
    """A language model's loop with four micro-batches that clips scaled gradients."""
    net = TinyGPT()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**8, growth_interval=5)
    watch(net, name="language model")
    for number, batch in enumerate(tokens(120, batch=4)):
        with autocast("fp16"):
            out = net(batch[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten()) / 4
        scaler.scale(loss).backward()
        if number % 4 == 3:
            clip_grad_norm_(net.parameters(), max_norm=0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


@loop(cause="step_outside_scaler", harmful=OUTSIDE, variants=[{"fused": False}, {"fused": True}])
def stepped_twice(watch: WatchCall, fused: bool = False) -> None:
    """scaler.step, update, and optimizer.step() once more, as it stood there before AMP came."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, fused=fused)
    scaler = grad_scaler(2.0**10)
    watch(net, name="twice")
    for x, y in draw_labelled(80):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.step()


@loop(cause="step_outside_scaler", harmful=OUTSIDE)
def stepped_twice_into_nan(watch: WatchCall) -> None:
    """The second step applies the gradients that the scaler skipped: all weights become NaN."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**28)
    watch(net, name="into NaN")
    for x, y in draw_labelled(60):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.step()


@loop(cause="step_outside_scaler", harmful=OUTSIDE)
def unscaled_then_stepped(watch: WatchCall) -> None:
    """unscale_ and clip through the scaler, then optimizer.step() directly: nothing is skipped."""
    net = ConvNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**10)
    watch(net, name="directly")
    for x, y in draw_labelled(80, (1, 8, 8)):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scaler.update()


@loop(cause="step_outside_scaler", harmful=OUTSIDE)
def one_of_two_directly(watch: WatchCall) -> None:
    """Of two optimizers one is stepped with its gradients still times the scale."""
    body, head = mlp(8, 32, 16), nn.Linear(16, 4)
    first = torch.optim.AdamW(body.parameters(), lr=1e-3)
    second = torch.optim.SGD(head.parameters(), lr=1e-5)
    scaler = grad_scaler(2.0**8)
    watch(nn.ModuleDict({"body": body, "head": head}), name="one of two")
    for x, y in draw_labelled(80):
        first.zero_grad()
        second.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(head(torch.relu(body(x))), y)
        scaler.scale(loss).backward()
        scaler.step(first)
        second.step()
        scaler.update()


LEFT_OUT = {*SCALE, *PRECISION, "lower_rate", "eps", "restore", "zero_grad"}


@loop(cause="step_left_out", harmful=LEFT_OUT, variants=[{"fused": False}, {"fused": True}])
def step_forgotten(watch: WatchCall, fused: bool = False) -> None:
    """unscale_, clip and update, and no step at all."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    scaler = grad_scaler()
    watch(net, name="forgotten")
    for x, y in draw_labelled(60):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.update()


@loop(cause="step_left_out", harmful=LEFT_OUT)
def step_filtered_by_norm(watch: WatchCall) -> None:
    """A loop that skips steps with a norm above a bound, which is too low."""
    net = ConvNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    scaler = grad_scaler()
    watch(net, name="filter")
    for x, y in draw_labelled(90, (1, 8, 8)):
        optimizer.zero_grad(set_to_none=True)
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if norm < 0.8:
            scaler.step(optimizer)
        scaler.update()


@loop(cause="step_left_out", harmful=LEFT_OUT)
def step_of_the_first_alone(watch: WatchCall) -> None:
    """Two optimizers are unscaled and clipped; only the first one is stepped."""
    body, head = mlp(8, 32, 16), nn.Linear(16, 4)
    first = torch.optim.AdamW(body.parameters(), lr=1e-3)
    second = torch.optim.AdamW(head.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(nn.ModuleDict({"body": body, "head": head}), name="first alone")
    for x, y in draw_labelled(80):
        for optimizer in (first, second):
            optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(head(torch.relu(body(x))), y)
        scaler.scale(loss).backward()
        for optimizer in (first, second):
            scaler.unscale_(optimizer)
        scaler.step(first)
        scaler.update()
