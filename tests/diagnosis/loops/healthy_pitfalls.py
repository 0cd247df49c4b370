"""Correct loops that resemble a fault: each would be reported by a naive rule."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.diagnosis.parts import DEVICE, Block, autocast, draw_labelled, grad_scaler, mlp
from tests.diagnosis.registry import HEALTHY, PRECISION, SCALE, WatchCall, loop


class CausalClassifier(nn.Module):
    """Attention whose mask of -inf is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = Block(32), nn.Linear(32, 4)
        self.register_buffer("mask", torch.full((6, 6), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.block(x, self.mask)[:, -1])
        return out


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "bf16"}])
def mask_in_a_buffer(watch: WatchCall, precision: str = "fp16") -> None:
    """A buffer is infinite by design, from the first step on."""
    net = CausalClassifier()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**20, enabled=precision == "fp16")
    watch(net, name="buffer")
    for x, y in draw_labelled(70, (6, 32), batch=16):
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Imputing(nn.Module):
    """Replaces readings that are missing by a learned value."""

    def __init__(self) -> None:
        super().__init__()
        self.default, self.net = nn.Parameter(torch.zeros(8)), mlp()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(torch.where(x.isnan(), self.default, x))
        return out


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "fp32"}])
def missing_by_design(watch: WatchCall, precision: str = "fp16") -> None:
    """NaN in the inputs marks missing values that the model fills in; the scale starts at 2^22."""
    net = Imputing()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**22, enabled=precision == "fp16")
    watch(net, name="missing")
    for x, y in draw_labelled(100):
        x[::7, 5] = math.nan
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class OwnAutocast(nn.Module):
    """A network whose forward pass opens autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    @torch.autocast(DEVICE, dtype=torch.float16)
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out


@loop(cause=HEALTHY, variants=[{"fused": False}, {"fused": True}])
def autocast_inside_forward(watch: WatchCall, fused: bool = False) -> None:
    """Autocast is on in the model only, so that it is off wherever the loop calls the scaler."""
    net = OwnAutocast()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    scaler = grad_scaler(2.0**20)
    watch(net, name="own autocast")
    for x, y in draw_labelled(100):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY)
def temperature_outside_scaler(watch: WatchCall) -> None:
    """A soft actor-critic: its temperature is trained in fp32 by an optimizer without a scaler."""
    actor, temperature = mlp(), nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    other = torch.optim.Adam([temperature], lr=1e-2)
    scaler = grad_scaler(2.0**10)
    watch(actor, name="temperature")
    for x, y in draw_labelled(100):
        optimizer.zero_grad()
        with autocast("fp16"):
            logits = actor(x)
        policy = torch.distributions.Categorical(logits=logits.float())
        loss = F.cross_entropy(logits.float(), y)
        loss = loss - temperature.exp().detach() * 0.1 * policy.entropy().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        other.zero_grad()
        (temperature.exp() * (policy.entropy().mean().detach() - 0.5)).backward()
        other.step()


@loop(cause=HEALTHY)
def distillation(watch: WatchCall) -> None:
    """The frozen teacher's weights are fp16; the student's are not."""
    teacher, student = mlp(8, 64, 4).half().requires_grad_(False), mlp(8, 16, 4)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)
    scaler = grad_scaler(2.0**18)
    watch(nn.ModuleDict({"teacher": teacher, "student": student}), name="distillation")
    for x, _ in draw_labelled(100):
        optimizer.zero_grad()
        with autocast("fp16"):
            target = teacher(x.half()).float().softmax(1)
            loss = F.cross_entropy(student(x), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "fp32"}])
def best_so_far(watch: WatchCall, precision: str = "fp16") -> None:
    """The best loss so far is logged from the start, when it is infinite."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12, enabled=precision == "fp16")
    handle = watch(net, name="best")
    best = math.inf
    for number, (x, y) in enumerate(draw_labelled(90)):
        if number % 30 == 0:
            handle.log({"val/best": best})
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        best = min(best, loss.item())
    handle.log({"val/best": best})


@loop(cause=HEALTHY)
def clipped_in_every_step(watch: WatchCall) -> None:
    """A threshold far below all norms, and a scale that grows often: norms are constant."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    scaler = grad_scaler(2.0**6, growth_interval=12)
    watch(net, name="clipped")
    for x, y in draw_labelled(120):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.02)
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY)
def saw_tooth_of_one_in_two(watch: WatchCall) -> None:
    """Of two optimizers of one scaler one is at its limit, and the other is never skipped."""
    body, head = mlp(8, 32, 16), nn.Linear(16, 4)
    first = torch.optim.AdamW(body.parameters(), lr=3e-3)
    second = torch.optim.AdamW(head.parameters(), lr=3e-3)
    scaler = grad_scaler(2.0**17, growth_interval=60)
    watch(nn.ModuleDict({"body": body, "head": head}), name="one in two")
    for x, y in draw_labelled(250):
        for optimizer in (first, second):
            optimizer.zero_grad(set_to_none=False)
        with autocast("fp16"):
            loss = F.cross_entropy(head(torch.relu(body(x))), y)
        scaler.scale(loss).backward()
        for optimizer in (first, second):
            scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY)
def fresh_scaler_for_fine_tuning(watch: WatchCall) -> None:
    """A second phase creates a new scaler with the state of the first one."""
    net = mlp()
    scaler = grad_scaler(2.0**22)
    watch(net, name="phases")
    batches = draw_labelled(120)
    for rate in (1e-2, 1e-3):
        optimizer = torch.optim.AdamW(net.parameters(), lr=rate)
        state = scaler.state_dict()
        scaler = grad_scaler(2.0**22)
        scaler.load_state_dict(state)
        for _ in range(60):
            x, y = next(batches)
            optimizer.zero_grad()
            with autocast("fp16"):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()


@loop(cause=HEALTHY, variants=[{"fused": False}, {"fused": True}])
def nan_that_is_swallowed(watch: WatchCall, fused: bool = False) -> None:
    """A softmax over a masked row has NaN gradients, which masked_fill takes out; from 2^24 on."""
    net = nn.ModuleDict({"score": nn.Linear(8, 1), "head": nn.Linear(8, 4)})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    scaler = grad_scaler(2.0**24)
    watch(net, name="swallowed")
    for x, y in draw_labelled(100, (5, 8)):
        mask = torch.ones(32, 5, dtype=torch.bool)
        mask[3] = False
        optimizer.zero_grad()
        with autocast("fp16"):
            scores = net["score"](x).squeeze(-1).float().masked_fill(~mask, -math.inf)
            pooled = (scores.softmax(1).unsqueeze(-1) * x).sum(1)
            pooled = torch.where(mask.any(1, keepdim=True), pooled, torch.zeros_like(pooled))
            loss = F.cross_entropy(net["head"](pooled), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


# ---- And faults that a hasty rule would miss -----------------------------------------------------


class Named(nn.Module):
    """A network that is called by keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, *, features: Tensor, weights: Tensor) -> Tensor:
        out: Tensor = self.net(features) * weights
        return out


@loop(
    cause="nonfinite_inputs",
    harmful={*SCALE, *PRECISION, "lower_rate", "eps", "zero_grad", "unscale", "clip"},
    variants=[{"precision": "fp16"}, {"precision": "bf16"}],
)
def inputs_by_keyword(watch: WatchCall, precision: str = "fp16") -> None:
    """A batch is a dictionary, and in every eighth one feature is infinite."""
    net = Named()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, enabled=precision == "fp16")
    watch(net, name="keywords")
    for number, (x, y) in enumerate(draw_labelled(60)):
        batch = {"features": x, "weights": torch.ones(32, 1)}
        if number % 8 == 7:
            x[0, 0] = math.inf
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(**batch), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Distances(nn.Module):
    """The distance of each row to a prototype, computed again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.body, self.prototypes = mlp(8, 32, 6), nn.Parameter(torch.randn(4, 6))
        self.reentrant = reentrant

    def _distances(self, x: Tensor) -> Tensor:
        apart = x[:, None].float() - self.prototypes
        return apart.square().sum(-1).sqrt()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self._distances, self.body(x), use_reentrant=self.reentrant)
        return -out


@loop(
    cause="singular_gradient",
    harmful={*SCALE, *PRECISION, "lower_rate", "clip", "zero_grad", "unscale", "restore"},
    variants=[{"reentrant": False}, {"reentrant": True}],
)
def prototype_that_is_a_row(watch: WatchCall, reentrant: bool = False) -> None:
    """Each tenth batch sets a prototype to a row, whose distance to itself is 0; checkpointed."""
    net = Distances(reentrant=reentrant)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**10)
    watch(net, name="prototypes")
    for number, (x, y) in enumerate(draw_labelled(80)):
        optimizer.zero_grad()
        with autocast("fp16"):
            if number % 10 >= 7:
                with torch.no_grad():
                    net.prototypes[1] = net.body(x)[4].float()
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(
    cause="singular_gradient",
    harmful={*SCALE, *PRECISION, "lower_rate", "clip", "zero_grad", "unscale", "restore"},
    variants=[{"backend": "eager"}, {"backend": "aot_eager"}],
)
def compiled_root(watch: WatchCall, backend: str = "eager") -> None:
    """A compiled loss whose root is 0: with aot_eager all of it is a single node."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = grad_scaler(2.0**10)
    watch(net, name="compiled")

    @torch.compile(backend=backend)
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        first, second = net(x).float(), net(x).float()
        apart = (first - second).square().sum(1).sqrt()
        return F.cross_entropy(first, y) + apart.mean()

    for x, y in draw_labelled(50):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = loss_of(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
