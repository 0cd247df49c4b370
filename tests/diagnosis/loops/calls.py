"""Calls of the scaler in the wrong order, and losses that were not scaled."""

import contextlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from tests.diagnosis.parts import autocast, draw_labelled, grad_scaler, make_generator, mlp
from tests.diagnosis.registry import HEALTHY, WatchCall, loop

#: What changes nothing about the order of calls.
HARMFUL = {"lower_rate", "bf16", "fp32", "eps", "growth_interval", "smaller_scale", "larger_scale"}


@loop(cause="loss_not_scaled", harmful=HARMFUL, variants=[{"fused": False}, {"fused": True}])
def scaled_and_dropped(watch: WatchCall, fused: bool = False) -> None:
    """The scaled loss is dropped, and backward is called on the loss itself."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=fused)
    scaler = grad_scaler(2.0**16)
    watch(net, name="dropped")
    for x, y in draw_labelled(120):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss)
        loss.backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="loss_not_scaled", harmful=HARMFUL)
def penalty_beside_a_scaled_loss(watch: WatchCall) -> None:
    """Two backward passes a step, of which only the first begins from a scaled loss."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**16)
    watch(net, name="penalty")
    for x, y in draw_labelled(120):
        optimizer.zero_grad()
        with autocast("fp16"):
            out = net(x)
            loss = F.cross_entropy(out, y)
        penalty = out.float().square().mean()
        scaler.scale(loss).backward(retain_graph=True)
        penalty.backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="loss_not_scaled", harmful=HARMFUL)
def generator_without_the_scale(watch: WatchCall) -> None:
    """A GAN that scales its discriminator's loss only; one scaler steps both optimizers."""
    generator, critic = mlp(4, 16, 2), mlp(2, 16, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**16)
    watch(generator, critic, name="gan")
    noise, real = make_generator(1), torch.ones(32, 1)
    for x, _ in draw_labelled(120):
        with autocast("fp16"):
            fake = generator(torch.randn(32, 4, generator=noise))
            loss = F.binary_cross_entropy_with_logits(critic(x[:, :2]), real)
            loss = loss + F.binary_cross_entropy_with_logits(critic(fake.detach()), 1 - real)
        of_critic.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(of_critic)
        with autocast("fp16"):
            fooled = F.binary_cross_entropy_with_logits(critic(fake), real)
        of_generator.zero_grad()
        fooled.backward()
        scaler.step(of_generator)
        scaler.update()


@loop(
    cause="loss_not_scaled",
    harmful=HARMFUL,
    raises="AssertionError: Attempted unscale_ but _scale is None",
)
def never_scaled(watch: WatchCall) -> None:
    """Backward on the loss from the first step on: the scaler has no scale yet."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(net, name="never")
    for x, y in draw_labelled(20):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY)
def scaled_by_its_scale(watch: WatchCall) -> None:
    """The loss is multiplied by scaler.get_scale() in all steps but the first."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**14)
    watch(net, name="by its scale")
    for number, (x, y) in enumerate(draw_labelled(120)):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        (loss * scaler.get_scale() if number else scaler.scale(loss)).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, variants=[{"parts": 2}, {"parts": 4}])
def scaled_in_parts(watch: WatchCall, parts: int = 2) -> None:
    """Losses are scaled one by one, and backward is called on a sum of some, then of the others."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**14)
    watch(net, name="parts")
    for x, y in draw_labelled(120):
        optimizer.zero_grad()
        with autocast("fp16"):
            out = net(x)
            losses = [F.cross_entropy(out[i::parts], y[i::parts]) for i in range(parts)]
        scaled = [scaler.scale(loss) for loss in losses]
        torch.stack(scaled[:-1]).sum().backward(retain_graph=True)
        scaled[-1].backward()
        scaler.step(optimizer)
        scaler.update()


@loop(
    cause="scaler_call_order",
    harmful=HARMFUL,
    raises="RuntimeError: step() has already been called",
)
def update_forgotten(watch: WatchCall) -> None:
    """Two steps without an update between them."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(net, name="no update")
    for x, y in draw_labelled(20):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)


@loop(
    cause="scaler_call_order",
    harmful=HARMFUL,
    raises="RuntimeError: unscale_() has already been called",
)
def unscaled_in_each_micro_batch(watch: WatchCall) -> None:
    """Accumulation that unscales after each backward pass, and steps after every fourth."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(net, name="micro-batches")
    for number, (x, y) in enumerate(draw_labelled(20)):
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y) / 4
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if number % 4 == 3:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@loop(
    cause="scaler_call_order",
    harmful=HARMFUL,
    raises="RuntimeError: unscale_() is being called after step()",
)
def unscaled_after_the_step(watch: WatchCall) -> None:
    """Gradients are unscaled for a log of their norm, when the step has unscaled them."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(net, name="after")
    for x, y in draw_labelled(20):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.unscale_(optimizer)
        scaler.update()


def _gradients_cached(net: nn.Module, scaler: GradScaler, x: Tensor, y: Tensor) -> None:
    """Scale the loss of detached outputs, and weight the outputs of each part by its gradients."""
    with autocast("fp16"):
        leaf = net(x).float().detach().requires_grad_()
    scaler.scale(F.cross_entropy(leaf, y)).backward()
    assert leaf.grad is not None
    for part, gradient in zip(x.split(8), leaf.grad.split(8), strict=True):
        with autocast("fp16"):
            out = net(part).float()
        (out * gradient).sum().backward()


def _summed_after_use(net: nn.Module, scaler: GradScaler, x: Tensor, y: Tensor) -> None:
    """Begin from each scaled loss for its gradient norm, and then from their sum."""
    with autocast("fp16"):
        out = net(x)
    losses = [scaler.scale(each) for each in (F.cross_entropy(out, y), out.square().mean())]
    for each in losses:
        each.backward(retain_graph=True)
        net.zero_grad()
    torch.stack(losses).sum().backward()


def _ascent_without_scale(net: nn.Module, scaler: GradScaler, x: Tensor, y: Tensor) -> None:
    """Move the weights along gradients of an unscaled loss, and clear these."""
    F.cross_entropy(net(x), y).backward()
    moves = [0.01 * torch.sign(p.grad) for p in net.parameters() if p.grad is not None]
    with torch.no_grad():
        torch._foreach_add_([*net.parameters()], moves)
    net.zero_grad()
    with autocast("fp16"):
        loss = F.cross_entropy(net(x), y)
    scaler.scale(loss).backward()
    with torch.no_grad():
        torch._foreach_sub_([*net.parameters()], moves)


def _gradients_by_hand(net: nn.Module, scaler: GradScaler, x: Tensor, y: Tensor) -> None:
    """Scale the loss with the scaler at first, and later its gradients by hand."""
    with autocast("fp16"):
        loss = F.cross_entropy(net(x), y)
    if scaler._scale is None:
        scaler.scale(loss).backward()
    else:
        loss.backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad *= scaler.get_scale()


def _weighted_by_hand(net: nn.Module, scaler: GradScaler, x: Tensor, y: Tensor) -> None:
    """Begin from a sum of losses of which each is multiplied by the scale."""
    with autocast("fp16"):
        out = net(x)
    scaler.scale(F.cross_entropy(out, y)).backward(retain_graph=True)
    scale = scaler.get_scale()
    (out.square().mean() * scale + out.abs().mean() * scale).backward()


PASSES = {
    each.__name__.strip("_"): each
    for each in (
        *(_gradients_cached, _summed_after_use, _ascent_without_scale, _gradients_by_hand),
        _weighted_by_hand,
    )
}


@loop(cause=HEALTHY, variants=[{"kind": each} for each in PASSES])
def scaled_in_another_way(watch: WatchCall, kind: str = "gradients_cached") -> None:
    """The last pass before a step does not begin from what the scaler returned."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**10)
    watch(net, name=kind)
    for x, y in draw_labelled(60):
        optimizer.zero_grad()
        PASSES[kind](net, scaler, x, y)
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY)
def summed_after_another_update(watch: WatchCall) -> None:
    """All losses of two scalers are scaled before the first one is updated."""
    nets = [mlp(), mlp()]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in nets]
    scalers = [grad_scaler(2.0**10), grad_scaler(2.0**8)]
    watch(*nets, name="two scalers")
    for x, y in draw_labelled(60):
        losses = []
        for net, optimizer, scaler in zip(nets, optimizers, scalers, strict=True):
            optimizer.zero_grad()
            with autocast("fp16"):
                out = net(x)
            both = scaler.scale([F.cross_entropy(out, y), out.square().mean()])
            losses.append(sum(both))
        for loss, optimizer, scaler in zip(losses, optimizers, scalers, strict=True):
            loss.backward()
            scaler.step(optimizer)
            scaler.update()


@loop(cause=HEALTHY)
def unscaled_twice_and_caught(watch: WatchCall) -> None:
    """A helper for clips unscales gradients whether or not the loop has done so."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**10)
    watch(net, name="caught")
    for x, y in draw_labelled(60):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        with contextlib.suppress(RuntimeError):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
