"""Schedules that advance in steps that the scaler skipped."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as schedules

from tests.diagnosis.parts import ConvNet, autocast, draw_labelled, grad_scaler, mlp
from tests.diagnosis.registry import PRECISION, SCALE, WatchCall, loop

HARMFUL = {*SCALE, *PRECISION, "lower_rate", "eps", "restore", "zero_grad", "unscale", "clip"}


def _warm_up(optimizer: Optimizer) -> schedules.LRScheduler:
    return schedules.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 30))


def _two_phases(optimizer: Optimizer) -> schedules.LRScheduler:
    first = schedules.LinearLR(optimizer, 0.1, total_iters=10)
    return schedules.SequentialLR(
        optimizer, [first, schedules.ExponentialLR(optimizer, 0.99)], [10]
    )


KINDS: dict[str, Callable[[Optimizer], schedules.LRScheduler]] = {
    "warmup": _warm_up,
    "onecycle": partial(schedules.OneCycleLR, max_lr=0.01, total_steps=101),
    "cosine": partial(schedules.CosineAnnealingLR, T_max=100),
    "sequential": _two_phases,
    "constant": partial(schedules.ConstantLR, factor=1.0),
    "restarts": partial(schedules.CosineAnnealingWarmRestarts, T_0=20),
}


@loop(
    cause="schedule_in_skipped_steps",
    harmful=HARMFUL,
    variants=[
        {"kind": "warmup"},
        {"kind": "onecycle"},
        {"kind": "cosine", "fused": True},
        {"kind": "sequential"},
        {"kind": "constant"},
        {"kind": "restarts", "fused": True},
    ],
)
def stepped_after_each_batch(watch: WatchCall, kind: str = "warmup", fused: bool = False) -> None:
    """The scheduler steps after each update, through the eight skips from 2^24 on too."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    scheduler = KINDS[kind](optimizer)
    scaler = grad_scaler(2.0**26)
    watch(net, name="each batch")
    for x, y in draw_labelled(100):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()


@loop(cause="schedule_in_skipped_steps", harmful=HARMFUL)
def between_step_and_update(watch: WatchCall) -> None:
    """The scheduler steps before the scaler's update, with a clip and accumulation of two."""
    net = ConvNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    scheduler = schedules.PolynomialLR(optimizer, total_iters=80, power=2.0)
    scaler = grad_scaler(2.0**28)
    watch(net, name="between")
    for number, (x, y) in enumerate(draw_labelled(160, (1, 8, 8), batch=16)):
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y) / 2
        scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scheduler.step()
            scaler.update()
            optimizer.zero_grad()


@loop(cause="schedule_in_skipped_steps", harmful=HARMFUL)
def of_one_of_two_optimizers(watch: WatchCall) -> None:
    """Two optimizers of one scaler; the second one overflows and has a schedule."""
    body, head = mlp(8, 32, 16), nn.Linear(16, 4)
    first = torch.optim.AdamW(body.parameters(), lr=1e-3)
    second = torch.optim.AdamW(head.parameters(), lr=1e-3)
    scheduler = schedules.StepLR(second, step_size=10, gamma=0.8)
    scaler = grad_scaler(2.0**28)
    watch(nn.ModuleDict({"body": body, "head": head}), name="second")
    for x, y in draw_labelled(80):
        for optimizer in (first, second):
            optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(head(torch.relu(body(x))), y)
        scaler.scale(loss).backward()
        for optimizer in (first, second):
            scaler.step(optimizer)
        scaler.update()
        scheduler.step()
