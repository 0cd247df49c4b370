"""A finite loss whose gradient is NaN, in any precision and at any scale."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.parts import autocast, draw_labelled, grad_scaler, mlp
from tests.diagnosis.registry import PRECISION, SCALE, WatchCall, loop

HARMFUL = {*SCALE, *PRECISION, "lower_rate", "clip", "zero_grad", "unscale", "restore"}


@loop(
    cause="singular_gradient",
    harmful=HARMFUL,
    variants=[{"fused": False}, {"fused": True}, {"clip": 1.0}, {"scale": 2.0**24}],
)
def root_of_a_distance(
    watch: WatchCall, fused: bool = False, clip: float = 0.0, scale: float = 2.0**12
) -> None:
    """A consistency loss between two equal outputs: the derivative of sqrt at 0 is inf times 0."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    scaler = grad_scaler(scale)
    watch(net, name="distance")
    for x, y in draw_labelled(60):
        optimizer.zero_grad()
        with autocast("fp16"):
            first, second = net(x).float(), net(x).float()
            apart = (first - second).square().sum(1).sqrt().mean()
            loss = F.cross_entropy(first, y) + 0.1 * apart
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), clip)
        scaler.step(optimizer)
        scaler.update()


class Entropy(nn.Module):
    """The entropy of a gate: the log of probabilities that ReLU made exactly 0."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.gate = nn.Linear(8, 32), nn.Linear(32, 6)
        self.experts = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        weights = F.relu(self.gate(hidden)).float()
        p = weights / weights.sum(1, keepdim=True).clamp_min(1e-6)
        # The value is guarded by where; its derivative is not.
        terms = torch.where(p > 0, p * p.log(), torch.zeros_like(p))
        return self.experts(hidden), terms.sum(1).mean()


@loop(cause="singular_gradient", harmful=HARMFUL)
def where_around_a_log(watch: WatchCall) -> None:
    """The trap of torch.where: the branch not taken has a derivative of NaN all the same."""
    net = Entropy()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    scaler = grad_scaler(2.0**10, growth_interval=100)
    watch(net, name="entropy")
    for x, y in draw_labelled(60):
        with autocast("fp16"):
            out, entropy = net(x)
            loss = F.cross_entropy(out, y) + 0.01 * entropy
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="singular_gradient", harmful=HARMFUL, variants=[{"padded": 4}, {"padded": 25}])
def masked_pooling(watch: WatchCall, padded: int = 4) -> None:
    """A row of only padding is pooled by softmax over -inf, then zeroed by where."""
    net = nn.ModuleDict({"score": nn.Linear(8, 1), "head": nn.Linear(8, 4)})
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(net, name="padding")
    for number, (x, y) in enumerate(draw_labelled(75, (5, 8))):
        mask = torch.ones(32, 5, dtype=torch.bool)
        if number % padded == padded - 1:
            mask[3] = False
        optimizer.zero_grad()
        with autocast("fp16"):
            scores = net["score"](x).squeeze(-1).float() + torch.where(mask, 0.0, float("-inf"))
            pooled = (scores.softmax(1).unsqueeze(-1) * x).sum(1)
            pooled = torch.where(mask.any(1, keepdim=True), pooled, torch.zeros_like(pooled))
            loss = F.cross_entropy(net["head"](pooled), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(
    cause="singular_gradient",
    harmful=HARMFUL,
    accepts=["nonfinite_without_scaler"],
    variants=[{"precision": "fp32"}, {"precision": "bf16"}],
)
def angle_between_equals(watch: WatchCall, precision: str = "fp32") -> None:
    """acos at 1, once a batch has two equal vectors; the loop ignores invalid gradients."""
    net = mlp(8, 32, 6)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    watch(net, name="angle")
    for number, (x, _) in enumerate(draw_labelled(60)):
        other = x if number % 3 == 2 else x.roll(1, 0)
        optimizer.zero_grad()
        with autocast(precision):
            a, b = net(x), net(other)
        cosine = F.cosine_similarity(a.float(), b.float()).clamp(max=1.0)
        cosine = torch.where(cosine > 1 - 1e-5, torch.ones_like(cosine), cosine)
        cosine = cosine.detach() + (a.float() - a.float().detach()).sum(1) * 1e-3
        loss = cosine.clamp(-1, 1).acos().mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        if norm.isfinite():
            optimizer.step()


@loop(
    cause="singular_gradient",
    harmful=HARMFUL,
    accepts=["nonfinite_without_scaler"],
    precision="bf16",
)
def deviation_of_equals(watch: WatchCall) -> None:
    """A spread computed by hand as the root of a variance, which is 0 in the 30th batch: NaN."""
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    watch(net, name="spread")
    for number, (x, y) in enumerate(draw_labelled(60)):
        if number == 30:
            x = x[:1].expand(32, 8)
        optimizer.zero_grad()
        with autocast("bf16"):
            out = net(x)
        out = out.float()
        variance = (out - out.mean(0)).square().mean(0)
        loss = F.cross_entropy(out, y) - 0.01 * variance.sqrt().mean()
        loss.backward()
        optimizer.step()


class SafeRoot(torch.autograd.Function):
    """A root with a gradient of its own, which divides by the root without a guard."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        out = x.clamp_min(0).sqrt()
        ctx.save_for_backward(out)  # type: ignore[attr-defined]
        return out

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * 0.5 / out


@loop(cause="singular_gradient", harmful=HARMFUL)
def function_of_its_own(watch: WatchCall) -> None:
    """A custom autograd Function with a backward that divides 0 by 0."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(net, name="function")
    for x, y in draw_labelled(50):
        optimizer.zero_grad()
        with autocast("fp16"):
            out, again = net(x), net(x.clone())
        spread = SafeRoot.apply((out.float() - again.float()) ** 2).mean()
        loss = F.cross_entropy(out.float(), y) + spread
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause="singular_gradient", harmful=HARMFUL, processes=2)
def nan_of_another_rank(watch: WatchCall) -> None:
    """Two ranks; the unwatched one differentiates the root of 0, and all get its NaN."""
    net = mlp()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**10)
    watch(net, name="ranks")
    rank = dist.get_rank()
    for x, y in draw_labelled(60, seed=1 + rank):
        optimizer.zero_grad()
        with autocast("fp16"):
            out = model(x).float()
        spread = out - out.detach() if rank == 1 else out - out.mean()
        loss = F.cross_entropy(out, y) + 0.01 * spread.square().sum(1).sqrt().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
