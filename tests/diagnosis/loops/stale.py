"""Gradients that are never cleared: they add up, and one overflow stays in them."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.diagnosis.parts import DEVICE, ConvNet, autocast, draw_labelled, grad_scaler, mlp
from tests.diagnosis.registry import PRECISION, SCALE, WatchCall, loop

HARMFUL = {*SCALE, *PRECISION, "lower_rate", "clip", "restore", "eps"}


@loop(
    cause="gradients_not_cleared",
    harmful=HARMFUL,
    variants=[{"fused": False}, {"fused": True}, {"clip": 1.0}],
)
def never_cleared(watch: WatchCall, fused: bool = False, clip: float = 0.0) -> None:
    """There is no zero_grad at all."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    scaler = grad_scaler(2.0**24)
    watch(net, name="never")
    for x, y in draw_labelled(80):
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


@loop(
    cause="gradients_not_cleared",
    harmful=HARMFUL,
    variants=[
        {"precision": "fp32"},
        {"precision": "bf16"},
        {"precision": "fp16"},
        {"precision": "fp16", "fused": True},
        {"precision": "fp32", "clip": 1.0},
    ],
)
def never_cleared_and_finite(
    watch: WatchCall, precision: str = "fp32", fused: bool = False, clip: float = 0.0
) -> None:
    """There is no zero_grad, and nothing overflows: each update is the sum of all batches."""
    net = mlp()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**4, enabled=precision == "fp16")
    watch(net, name="sum")
    for x, y in draw_labelled(60):
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        if clip:
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


@loop(cause="gradients_not_cleared", harmful=HARMFUL)
def one_of_two_is_cleared(watch: WatchCall) -> None:
    """Two optimizers without a scaler; the second one is never cleared."""
    body, head = mlp(8, 32, 16), nn.Linear(16, 4)
    first = torch.optim.SGD(body.parameters(), lr=0.01)
    second = torch.optim.SGD(head.parameters(), lr=0.01)
    watch(nn.ModuleDict({"body": body, "head": head}), name="one of two")
    for x, y in draw_labelled(60):
        first.zero_grad()
        F.cross_entropy(head(torch.relu(body(x))), y).backward()
        first.step()
        second.step()


@loop(cause="gradients_not_cleared", harmful=HARMFUL)
def cleared_after_good_steps(watch: WatchCall) -> None:
    """zero_grad is called only where the scale did not fall: never after a skip."""
    net = ConvNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    scaler = grad_scaler(2.0**26)
    watch(net, name="good steps")
    for x, y in draw_labelled(60, (1, 8, 8)):
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            optimizer.zero_grad()


@loop(cause="gradients_not_cleared", harmful=HARMFUL)
def cleared_of_the_other(watch: WatchCall) -> None:
    """Two optimizers; the first one is cleared twice, the second one never."""
    body, head = mlp(8, 32, 16), nn.Linear(16, 4)
    first = torch.optim.AdamW(body.parameters(), lr=1e-3)
    second = torch.optim.SGD(head.parameters(), lr=0.05)
    scaler = grad_scaler(2.0**26)
    watch(nn.ModuleDict({"body": body, "head": head}), name="other")
    for x, y in draw_labelled(60):
        first.zero_grad()
        first.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(head(torch.relu(body(x))), y)
        scaler.scale(loss).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()


@loop(cause="gradients_not_cleared", harmful=HARMFUL)
def cleared_before_accumulation(watch: WatchCall) -> None:
    """Accumulation that clears where the index is the last one, which the loop never reaches."""
    accumulation = 4
    net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**24)
    watch(net, name="accumulation")
    for number, (x, y) in enumerate(draw_labelled(160)):
        if number % accumulation == accumulation:
            optimizer.zero_grad(set_to_none=True)
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y) / accumulation
        scaler.scale(loss).backward()
        if number % accumulation == accumulation - 1:
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
