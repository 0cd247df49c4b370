"""Loops in further styles: loss scaling by hand, rates set by hand, compiled losses, closures."""

import copy
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.parts import (
    DEVICE,
    ConvNet,
    TinyGPT,
    autocast,
    draw_labelled,
    grad_scaler,
    make_generator,
    mlp,
    tokens,
)
from tests.diagnosis.registry import HEALTHY, PRECISION, SCALE, WatchCall, loop


class WarmUp:
    """A schedule of no class of torch's: it writes the rate into the groups, as timm's do."""

    def __init__(self, optimizer: torch.optim.Optimizer, rate: float, steps: int) -> None:
        self._optimizer, self._rate, self._steps = optimizer, rate, steps
        self.step(0)

    def step(self, number: int) -> None:
        """Set the rate of a step."""
        warm = min(1.0, (number + 1) / self._steps)
        rate = self._rate * warm * (0.5 + 0.5 * math.cos(number / 200))
        for group in self._optimizer.param_groups:
            group["lr"] = rate


@loop(cause=HEALTHY)
def rate_set_after_applied_steps(watch: WatchCall) -> None:
    """timm's style: an average of the weights, a clip, and a rate set by hand after each update."""
    net = ConvNet()
    average = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = WarmUp(optimizer, 3e-3, 20)
    scaler = grad_scaler(2.0**24)
    watch(net, average, name="timm")
    updates = 0
    for x, y in draw_labelled(120, (1, 8, 8)):
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward(create_graph=False)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if scaler.get_scale() < before:
            continue
        updates += 1
        schedule.step(updates)
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(net.parameters()), 0.1)


@loop(cause="schedule_in_skipped_steps", harmful={*SCALE, *PRECISION, "lower_rate", "clip"})
def rate_set_in_skipped_steps(watch: WatchCall) -> None:
    """The same schedule, by the number of the batch, while the scaler skips every second step."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = WarmUp(optimizer, 1e-3, 60)
    scaler = grad_scaler(2.0**40)
    watch(net, name="by number")
    for number, (x, y) in enumerate(draw_labelled(120)):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step(number)


def _scaled_by_hand(watch: WatchCall, scale: float, *, is_checked: bool) -> None:
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    watch(net, name="by hand")
    for x, y in draw_labelled(120):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        (loss * scale).backward()
        gradients = [p.grad for p in net.parameters() if p.grad is not None]
        torch._foreach_div_(gradients, scale)
        if is_checked and not all(bool(each.isfinite().all()) for each in gradients):
            scale /= 2
            continue
        optimizer.step()


@loop(cause=HEALTHY, variants=[{"scale": 2.0**10}, {"scale": 2.0**26}])
def scaling_by_hand(watch: WatchCall, scale: float = 2.0**26) -> None:
    """Apex' style without a scaler: the loop divides, checks, and halves the scale itself."""
    _scaled_by_hand(watch, scale, is_checked=True)


@loop(cause="nonfinite_without_scaler", harmful={"zero_grad", "restore", "growth_interval"})
def scaling_by_hand_unchecked(watch: WatchCall) -> None:
    """Scale by a fixed factor that is too large, with unchecked gradients."""
    _scaled_by_hand(watch, 2.0**26, is_checked=False)


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "bf16"}])
def toggled_optimizers(watch: WatchCall, precision: str = "fp16") -> None:
    """Lightning's manual optimization: each optimizer's turn takes gradients off the other's."""
    generator, critic = mlp(4, 16, 2), mlp(2, 16, 1)
    optimizers = [
        torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.5, 0.9)) for net in (generator, critic)
    ]
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12, enabled=precision == "fp16")
    watch(generator, critic, name="manual")
    draws = make_generator(1)
    for number in range(120):
        real = torch.randn(32, 2, generator=draws) + 2
        for turn, other in enumerate((critic, generator)):
            if turn == 0 and number % 2:
                continue
            other.requires_grad_(False)
            with autocast(precision):
                fake = generator(torch.randn(32, 4, generator=draws))
                loss = F.softplus(-critic(fake)).mean()
                if turn:
                    loss = (
                        F.softplus(critic(fake.detach())).mean() + F.softplus(-critic(real)).mean()
                    )
            optimizers[turn].zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizers[turn])
            other.requires_grad_(True)
        scaler.update()


@loop(
    cause="singular_gradient",
    # Without a scaler the first step with a NaN is applied: what came of it is all that is left.
    accepts=["nonfinite_without_scaler"],
    harmful={*SCALE, *PRECISION, "lower_rate", "clip", "restore"},
    variants=[{"precision": "fp32"}, {"precision": "fp16"}],
)
def penalty_at_a_flat_point(watch: WatchCall, precision: str = "fp32") -> None:
    """A gradient penalty's norm by sqrt, where a ReLU network is flat: its gradient there is 0."""
    critic = mlp(2, 16, 1)
    optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8, enabled=precision == "fp16")
    watch(critic, name="penalty")
    draws = make_generator(1)
    for number in range(60):
        points = torch.randn(32, 2, generator=draws).requires_grad_()
        weight = torch.ones(32, 1)
        if number >= 20:
            weight[3] = 0.0  # a masked sample
        with autocast(precision):
            scores = critic(points) * weight
        [slopes] = torch.autograd.grad(scores.float().sum(), points, create_graph=True)
        penalty = (slopes.square().sum(1).sqrt() - 1).square().mean()
        optimizer.zero_grad()
        scaler.scale(scores.float().mean() + penalty).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="nonfinite_without_scaler", precision="fp32", harmful={*SCALE, "unscale", "zero_grad"})
def closures_into_a_pole(watch: WatchCall) -> None:
    """LBFGS without a line search, whose long steps leave the domain of a logarithm."""
    net = mlp(8, 8, 1)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=2.0, max_iter=4)
    watch(net, name="closures")
    for x, _ in draw_labelled(40):
        target = x.square().sum(1, keepdim=True)

        def closure(x: Tensor = x, target: Tensor = target) -> Tensor:
            optimizer.zero_grad()
            loss = (net(x) + 1.5).log().sub(target).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


@loop(
    cause="forward_overflow",
    harmful={*SCALE, "lower_rate", "clip", "eps", "zero_grad", "restore", "unscale"},
)
def region_without_autocast(watch: WatchCall) -> None:
    """Autocast is off for the loss, but its input is still half: squares exceed 65,504."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-12)
    scaler = grad_scaler(2.0**8)
    watch(net, name="region")
    for number, (x, y) in enumerate(draw_labelled(80)):
        optimizer.zero_grad()
        with autocast("fp16"):
            out = net(x * (3000.0 if number >= 30 else 1.0))
            with torch.autocast(DEVICE, enabled=False):
                loss = (out.square().mean(1) - y).abs().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY)
def region_in_fp32(watch: WatchCall) -> None:
    """The same region with its input converted first."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-12)
    scaler = grad_scaler(2.0**-10)
    watch(net, name="region")
    for number, (x, y) in enumerate(draw_labelled(80)):
        optimizer.zero_grad()
        with autocast("fp16"):
            out = net(x * (3000.0 if number >= 30 else 1.0))
            with torch.autocast(DEVICE, enabled=False):
                loss = (out.float().square().mean(1) - y).abs().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "bf16"}])
def deferred_items(watch: WatchCall, precision: str = "fp16") -> None:
    """Hugging Face's style: losses are summed as tensors and read at the end of a log interval."""
    net = TinyGPT()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**20, enabled=precision == "fp16")
    handle = watch(net, name="trainer")
    total = torch.zeros(())
    for number, batch in enumerate(tokens(160)):
        with autocast(precision):
            out = net(batch[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten()) / 2
        scaler.scale(loss).backward()
        total += loss.detach()
        if number % 2 == 0:
            continue
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            schedule.step()
        optimizer.zero_grad()
        if number % 20 == 19:
            handle.log({"train/loss": total.item() / 10})
            total -= total


@loop(cause="scaled_gradients_clipped", harmful={*SCALE, *PRECISION, "lower_rate", "zero_grad"})
def values_clipped_while_scaled(watch: WatchCall) -> None:
    """clip_grad_value_ before unscale_: every element is at the limit."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=100.0)
    scaler = grad_scaler(2.0**14, growth_interval=30)
    watch(net, name="values")
    for x, y in draw_labelled(150):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        nn.utils.clip_grad_value_(net.parameters(), 1e-3)
        scaler.step(optimizer)
        scaler.update()


@loop(
    cause="singular_gradient",
    harmful={*SCALE, *PRECISION, "lower_rate", "clip", "restore"},
    variants=[{"backend": "eager"}, {"backend": "aot_eager"}],
)
def compiled_loss(watch: WatchCall, backend: str = "eager") -> None:
    """A compiled loss takes the root of a distance that is 0 from the 20th batch on."""

    @torch.compile(backend=backend)
    def distance(one: Tensor, other: Tensor) -> Tensor:
        return (one - other).square().sum(1).sqrt().mean()

    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**8)
    watch(net, name="compiled")
    for number, (x, _) in enumerate(draw_labelled(60)):
        optimizer.zero_grad()
        with autocast("fp16"):
            out = net(x)
            other = net(x.roll(1, 0))
        mirrored = out if number >= 20 else other
        loss = distance(out.float(), mirrored.float()) + other.float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="nonfinite_without_scaler", precision="bf16", harmful={*SCALE, "unscale", "zero_grad"})
def stepped_in_backward_into_nan(watch: WatchCall) -> None:
    """torchtune's optimizer-in-backward at a rate that grows without end."""
    net = mlp()
    optimizers: dict[Tensor, torch.optim.Optimizer] = {
        p: torch.optim.SGD([p], lr=1e-2) for p in net.parameters()
    }

    def step(parameter: Tensor) -> None:
        optimizer = optimizers[parameter]
        optimizer.param_groups[0]["lr"] *= 1.5
        optimizer.step()
        optimizer.zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    watch(net, name="in backward")
    for x, y in draw_labelled(120):
        with autocast("bf16"):
            loss = (net(x) - y[:, None]).square().mean()
        loss.backward()


def _without_sync(watch: WatchCall, *, is_cleared: bool) -> None:
    net = DistributedDataParallel(mlp())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**16 if is_cleared else 2.0**22)
    watch(net, name="no_sync")
    for number, (x, y) in enumerate(draw_labelled(160, seed=1 + dist.get_rank())):
        is_last = number % 4 == 3
        net.require_backward_grad_sync = is_last  # what no_sync() sets
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y) / 4
        scaler.scale(loss).backward()
        if is_last:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            if is_cleared:
                optimizer.zero_grad()


@loop(cause=HEALTHY, processes=2)
def accumulation_without_sync(watch: WatchCall) -> None:
    """Gradients of four micro-batches are reduced with the last."""
    _without_sync(watch, is_cleared=True)


@loop(cause="gradients_not_cleared", processes=2, harmful={*SCALE, *PRECISION, "lower_rate"})
def accumulation_without_end(watch: WatchCall) -> None:
    """The same loop, in which nothing clears the gradients."""
    _without_sync(watch, is_cleared=False)
