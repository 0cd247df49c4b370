"""Scalers that are new, not restored, or that do nothing."""

import copy

import torch
import torch.nn.functional as F
from torch import nn

from tests.diagnosis.parts import (
    DEVICE,
    ConvNet,
    TinyGPT,
    autocast,
    draw_labelled,
    grad_scaler,
    mlp,
    tokens,
)
from tests.diagnosis.registry import SCALE, WatchCall, loop

HARMFUL = {"growth_interval", "lower_rate", "bf16", "fp32", "clip", "eps", "zero_grad", "unscale"}


@loop(
    cause="scaler_not_restored",
    harmful=HARMFUL,
    variants=[{"steps": 10}, {"steps": 25}, {"steps": 1}],
)
def scaler_of_each_epoch(watch: WatchCall, steps: int = 10) -> None:
    """A new scaler at 2^24 for each epoch of so many steps: each one searches for its scale."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    watch(net, name="epochs")
    batches = draw_labelled(100)
    for _ in range(100 // steps):
        scaler = grad_scaler(2.0**24)
        for _ in range(steps):
            x, y = next(batches)
            optimizer.zero_grad()
            with autocast("fp16"):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@loop(cause="scaler_not_restored", harmful=HARMFUL, variants=[{"fused": False}, {"fused": True}])
def resumed_without_it(watch: WatchCall, fused: bool = False) -> None:
    """A second attempt that loads weights and optimizer, and begins with a scaler of its own."""
    checkpoint: dict[str, object] = {}
    batches = draw_labelled(140)
    for attempt in range(2):
        net = mlp()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
        scaler = grad_scaler(2.0**24)
        if checkpoint:
            net.load_state_dict(checkpoint["net"])
            optimizer.load_state_dict(checkpoint["optimizer"])
        with watch(net, run="resumed") as handle:
            if attempt:
                handle.resume(70)
            for _ in range(70):
                x, y = next(batches)
                optimizer.zero_grad()
                with autocast("fp16"):
                    loss = F.cross_entropy(net(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        checkpoint = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}


@loop(cause="scaler_not_restored", harmful=HARMFUL)
def copied_before_training(watch: WatchCall) -> None:
    """Each restart within the script takes a deep copy of the scaler that was never used."""
    net = ConvNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    pristine = grad_scaler(2.0**26)
    watch(net, name="copies")
    batches = draw_labelled(90, (1, 8, 8))
    for _ in range(3):
        scaler = copy.deepcopy(pristine)
        for _ in range(30):
            x, y = next(batches)
            optimizer.zero_grad()
            with autocast("fp16"):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()


@loop(
    cause="scaler_without_fp16",
    harmful={*SCALE, "lower_rate", "clip", "eps"},
    variants=[{"precision": "bf16"}, {"precision": "fp32"}],
)
def scaler_for_nothing(watch: WatchCall, precision: str = "bf16") -> None:
    """A scaler around a loop in bf16 or fp32, which does not need it."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**16)
    watch(net, name="nothing")
    for x, y in draw_labelled(60):
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="scaler_without_fp16", harmful={*SCALE, "lower_rate", "clip"}, precision="bf16")
def weights_in_bfloat16(watch: WatchCall) -> None:
    """A whole model in bfloat16, with accumulation and clip under a scaler."""
    net = TinyGPT().bfloat16()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = grad_scaler(2.0**10)
    watch(net, name="bfloat16")
    for number, batch in enumerate(tokens(60)):
        out = net(batch[:, :-1])
        loss = F.cross_entropy(out.flatten(0, 1).float(), batch[:, 1:].flatten()) / 2
        scaler.scale(loss).backward()
        if number % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


@loop(cause="scaler_without_fp16", harmful={*SCALE, "lower_rate", "clip"}, precision="fp32")
def autocast_that_is_off(watch: WatchCall) -> None:
    """use_amp is False for autocast but not for the scaler."""
    net = ConvNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True)
    scaler = grad_scaler(2.0**16)
    watch(net, name="off")
    for x, y in draw_labelled(60, (1, 8, 8)):
        optimizer.zero_grad()
        with torch.autocast(DEVICE, torch.float16, enabled=False):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


FP16_GRADIENTS = {*SCALE, "lower_rate", "eps", "zero_grad", "unscale", "restore", "clip"}
UNSCALES = "ValueError: Attempting to unscale FP16 gradients"


@loop(
    cause="fp16_gradients",
    harmful=FP16_GRADIENTS,
    raises=UNSCALES,
    variants=[{"clip": 1.0}, {"clip": 0.0}],
)
def whole_model_in_half(watch: WatchCall, clip: float = 0.0) -> None:
    """model.half() under a scaler: torch refuses to unscale its gradients."""
    net = mlp().half()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(net, name="half")
    for x, y in draw_labelled(20):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x.half()).float(), y)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


@loop(cause="fp16_gradients", harmful=FP16_GRADIENTS, raises=UNSCALES)
def adapter_in_half(watch: WatchCall) -> None:
    """A frozen base in fp16, and a low-rank adapter that took its dtype from there."""
    base = mlp().half().requires_grad_(False)
    adapter = nn.Sequential(nn.Linear(8, 2, bias=False), nn.Linear(2, 4, bias=False))
    adapter = adapter.to(base[0].weight.dtype)
    head = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW([*adapter.parameters(), *head.parameters()], lr=1e-3)
    scaler = grad_scaler()
    watch(nn.ModuleDict({"base": base, "adapter": adapter, "head": head}), name="adapter")
    for x, y in draw_labelled(20):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(head(base(x.half()) + adapter(x.half())), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="fp16_gradients", harmful=FP16_GRADIENTS, raises=UNSCALES)
def one_head_in_half(watch: WatchCall) -> None:
    """A head that is converted after 30 good steps, as one that is loaded from fp16 weights is."""
    body, head = mlp(8, 32, 16), nn.Linear(16, 4)
    net = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = grad_scaler()
    watch(net, name="head")
    for number, (x, y) in enumerate(draw_labelled(60)):
        if number == 30:
            head.half()
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


NO_CHECKS = {*SCALE, "lower_rate", "bf16", "fp32", "clip", "eps", "restore"}


@loop(
    cause="no_inf_checks",
    harmful=NO_CHECKS,
    accepts=["no_gradient"],
    raises="AssertionError: No inf checks were recorded for this optimizer",
)
def optimizer_of_another_model(watch: WatchCall) -> None:
    """The optimizer holds the parameters of a model that was replaced before the training."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net = copy.deepcopy(net)
    scaler = grad_scaler()
    watch(net, name="replaced")
    for x, y in draw_labelled(20):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(
    cause="no_inf_checks",
    harmful=NO_CHECKS,
    raises="AssertionError: No inf checks were recorded prior to update",
)
def update_before_any_step(watch: WatchCall) -> None:
    """Accumulation that updates the scaler at each micro-batch, and steps at every fourth."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    scaler = grad_scaler()
    watch(net, name="micro-batches")
    for number, (x, y) in enumerate(draw_labelled(20)):
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y) / 4
        scaler.scale(loss).backward()
        if number % 4 == 3:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()


@loop(
    cause="no_inf_checks",
    harmful=NO_CHECKS,
    accepts=["step_outside_scaler"],
    raises="AssertionError: No inf checks were recorded prior to update",
)
def stepped_past_the_scaler(watch: WatchCall) -> None:
    """optimizer.step() where scaler.step(optimizer) belongs: update finds nothing checked."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    scaler = grad_scaler()
    watch(net, name="past")
    for x, y in draw_labelled(20):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        optimizer.step()
        scaler.update()


@loop(
    cause="no_inf_checks",
    harmful=NO_CHECKS,
    accepts=["no_gradient"],
    raises="AssertionError: No inf checks were recorded for this optimizer",
)
def frozen_by_an_epoch(watch: WatchCall) -> None:
    """From the 20th step on a side network is frozen; its optimizer is stepped all the same."""
    body, side = mlp(), mlp()
    first = torch.optim.AdamW(body.parameters(), lr=1e-3)
    second = torch.optim.AdamW(side.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(nn.ModuleDict({"body": body, "side": side}), name="frozen")
    for number, (x, y) in enumerate(draw_labelled(40)):
        first.zero_grad()
        second.zero_grad()
        if number == 20:
            side.requires_grad_(False)
        with autocast("fp16"):
            loss = F.cross_entropy(body(x), y) + F.cross_entropy(side(x), y)
        scaler.scale(loss).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
