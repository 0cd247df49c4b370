"""Sound loops of one model and one optimizer, in the styles that people write."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.utils.checkpoint import checkpoint

from tests.diagnosis.parts import (
    DEVICE,
    ConvNet,
    GRUNet,
    TinyGPT,
    autocast,
    draw_labelled,
    grad_scaler,
    make_generator,
    mlp,
    tokens,
)
from tests.diagnosis.registry import HEALTHY, WatchCall, loop


@loop(
    cause=HEALTHY,
    variants=[
        {"precision": "fp16"},
        {"precision": "fp16", "fused": True},
        {"precision": "bf16"},
        {"precision": "fp32"},
    ],
)
def documented(watch: WatchCall, precision: str = "fp16", fused: bool = False) -> None:
    """PyTorch's documented loop; outside of fp16 the scaler is disabled."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12, enabled=precision == "fp16")
    watch(net, name="documented")
    for x, y in draw_labelled(100):
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, variants=[{"fused": False}, {"fused": True}])
def accumulation(watch: WatchCall, fused: bool = False) -> None:
    """Four micro-batches, unscaled and clipped at the last."""
    net = TinyGPT()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, fused=fused)
    scaler = grad_scaler(2.0**12)
    watch(net, name="accumulation")
    for number, batch in enumerate(tokens(160, batch=4)):
        with autocast("fp16"):
            out = net(batch[:, :-1])
            loss = F.cross_entropy(out.flatten(0, 1), batch[:, 1:].flatten()) / 4
        scaler.scale(loss).backward()
        if number % 4 == 3:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)


@loop(cause=HEALTHY, variants=[{"scale": 2.0**24}, {"scale": 2.0**24, "fused": True}])
def calibration(watch: WatchCall, scale: float = 2.0**24, fused: bool = False) -> None:
    """A start from far above the limit: the first steps are skipped, and the rest applied."""
    net = ConvNet()
    # If its first step is skipped, fused SGD with momentum reads an unwritten buffer.
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
    scaler = grad_scaler(scale)
    watch(net, name="calibration")
    for x, y in draw_labelled(150, (1, 8, 8)):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, variants=[{"fused": False}, {"fused": True}])
def saw_tooth(watch: WatchCall, fused: bool = False) -> None:
    """A scale at its limit, tried again every 60 applied steps: one skip each."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, fused=fused)
    scaler = grad_scaler(2.0**17, growth_interval=60)
    watch(net, name="saw-tooth")
    for x, y in draw_labelled(300):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def _cleared_by_data(net: nn.Module, _: torch.optim.Optimizer) -> None:
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.data.zero_()


def _cleared_by_foreach(net: nn.Module, _: torch.optim.Optimizer) -> None:
    gradients = [p.grad for p in net.parameters() if p.grad is not None]
    if gradients:
        torch._foreach_zero_(gradients)


CLEARING = {
    "set_to_none": lambda net, optimizer: optimizer.zero_grad(set_to_none=True),
    "to_zero": lambda net, optimizer: optimizer.zero_grad(set_to_none=False),
    "by_module": lambda net, optimizer: net.zero_grad(set_to_none=False),
    "by_data": _cleared_by_data,
    "by_foreach": _cleared_by_foreach,
}


@loop(cause=HEALTHY, variants=[{"way": way} for way in CLEARING])
def cleared(watch: WatchCall, way: str = "to_zero") -> None:
    """Ways to clear gradients, through the skips of a start from 2^22."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = grad_scaler(2.0**22)
    watch(net, name="cleared")
    for x, y in draw_labelled(120):
        CLEARING[way](net, optimizer)
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY)
def cleared_between_step_and_update(watch: WatchCall) -> None:
    """zero_grad after the step and before the update, as some trainers have it."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = grad_scaler(2.0**22)
    watch(net, name="between")
    for x, y in draw_labelled(120):
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        optimizer.zero_grad(set_to_none=False)
        scaler.update()


@loop(cause=HEALTHY, precision="fp32", variants=[{"way": way} for way in CLEARING])
def cleared_without_a_scaler(watch: WatchCall, way: str = "to_zero") -> None:
    """The same ways, each after the step, with two batches accumulated for it."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    watch(net, name="cleared in fp32")
    for number, (x, y) in enumerate(draw_labelled(120)):
        (F.cross_entropy(net(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            CLEARING[way](net, optimizer)


@loop(cause=HEALTHY, precision="fp32")
def adversary_cleared_before_its_own_pass(watch: WatchCall) -> None:
    """A discriminator is cleared before its own pass: the generator's pass adds to it unused."""
    generator, discriminator = mlp(8, 16, 8), mlp(8, 16, 1)
    g = torch.optim.Adam(generator.parameters(), lr=1e-3)
    d = torch.optim.Adam(discriminator.parameters(), lr=1e-3)
    watch(nn.ModuleDict({"g": generator, "d": discriminator}), name="adversary")
    for x, _ in draw_labelled(60):
        d.zero_grad()
        fake = generator(torch.randn_like(x))
        real_loss = F.softplus(-discriminator(x)).mean()
        (real_loss + F.softplus(discriminator(fake.detach())).mean()).backward()
        d.step()
        g.zero_grad()
        F.softplus(-discriminator(fake)).mean().backward()
        g.step()


@loop(cause=HEALTHY, precision="fp32", variants=[{"precision": "fp32"}, {"precision": "bf16"}])
def recurrent(watch: WatchCall, precision: str = "fp32") -> None:
    """A GRU over sequences, clipped, without a scaler."""
    net = GRUNet()
    optimizer = torch.optim.RMSprop(net.parameters(), lr=3e-3)
    watch(net, name="recurrent")
    for x, y in draw_labelled(80, (6, 4)):
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


class Checkpointed(nn.Module):
    """A body that is computed again in the backward pass."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.head = nn.Linear(8, 32), mlp(32, 32, 32), nn.Linear(32, 4)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = checkpoint(self.body, hidden, use_reentrant=self.reentrant)
        out: Tensor = self.head(hidden)
        return out


@loop(cause=HEALTHY, variants=[{"reentrant": False}, {"reentrant": True}])
def gradient_checkpointing(watch: WatchCall, reentrant: bool = False) -> None:
    """Activations are recomputed; the reentrant way runs a backward pass inside another."""
    net = Checkpointed(reentrant=reentrant)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scaler = grad_scaler(2.0**20)
    watch(net, name="checkpointing")
    for x, y in draw_labelled(90):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "bf16"}])
def masked_attention(watch: WatchCall, precision: str = "fp16") -> None:
    """A mask of -inf is an argument of the watched module itself."""
    net = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
    head = nn.Linear(32, 4)
    optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()], lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12, enabled=precision == "fp16")
    watch(net, head, name="mask")
    mask = torch.full((6, 6), float("-inf")).triu(1)
    for x, y in draw_labelled(80, (6, 32), batch=16):
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(head(net(x, src_mask=mask)[:, -1]), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Experts(nn.Module):
    """Four experts, the last of which gets few examples, and often none."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(mlp(8, 16, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        level = x[:, 0]
        which = (level > -0.5).long() + (level > 0.5).long() + (level > 2.2).long()
        out = torch.zeros(len(x), 4, dtype=torch.float32)
        for number, expert in enumerate(self.experts):
            rows = (which == number).nonzero().squeeze(1)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]).float())
        return out


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "bf16"}])
def mixture_of_experts(watch: WatchCall, precision: str = "fp16") -> None:
    """An expert that is rarely used has no gradient in most steps: rare, and not never."""
    net = Experts()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12, enabled=precision == "fp16")
    watch(net, name="experts")
    for x, y in draw_labelled(150):
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY)
def layer_drop(watch: WatchCall) -> None:
    """Blocks are left out at random, and the last one for a hundred steps."""
    blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    net = nn.ModuleDict({"first": nn.Linear(8, 16), "blocks": blocks, "head": nn.Linear(16, 4)})
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scaler = grad_scaler()
    watch(net, name="layer drop")
    generator = make_generator(5)
    for number, (x, y) in enumerate(draw_labelled(160)):
        optimizer.zero_grad()
        with autocast("fp16"):
            hidden = net["first"](x)
            for index, block in enumerate(blocks):
                is_late = index == 2 and not 60 < number < 70
                if torch.rand((), generator=generator) > 0.3 and not is_late:
                    hidden = hidden + torch.tanh(block(hidden))
            loss = F.cross_entropy(net["head"](hidden), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, variants=[{"listed": False}, {"listed": True}])
def frozen_body(watch: WatchCall, listed: bool = False) -> None:
    """A frozen body with its parameters in the optimizer."""
    net = mlp(8, 32, 16)
    head = nn.Linear(16, 4)
    net.requires_grad_(False)
    given = [*net.parameters(), *head.parameters()] if listed else list(head.parameters())
    optimizer = torch.optim.AdamW(given, lr=1e-2)
    scaler = grad_scaler()
    watch(nn.Sequential(net, head), name="frozen")
    for x, y in draw_labelled(130):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(head(net(x)), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class LowRank(nn.Module):
    """A frozen linear layer and a trained one of rank 2 with its second factor initialized to 0."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x))
        return out


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "bf16"}])
def low_rank_adapters(watch: WatchCall, precision: str = "fp16") -> None:
    """LoRA by hand: the gradient of the first factor is exactly 0 only in the first step."""
    net = nn.Sequential(LowRank(nn.Linear(8, 32)), nn.ReLU(), LowRank(nn.Linear(32, 4)))
    trained = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12, enabled=precision == "fp16")
    watch(net, name="adapters")
    for x, y in draw_labelled(120):
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, variants=[{"hand": "fixed"}, {"hand": "tensor"}])
def scale_set_by_hand(watch: WatchCall, hand: str = "fixed") -> None:
    """update(new_scale): a scale that the loop chooses, constant or raised at step 50."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = grad_scaler(2.0**8)
    watch(net, name="by hand")
    for number, (x, y) in enumerate(draw_labelled(100)):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        if hand == "fixed":
            scaler.update(2.0**8)
        else:
            scaler.update(torch.tensor(2.0**11) if number == 50 else None)


@loop(cause=HEALTHY, variants=[{"fused": False}, {"fused": True}])
def resumed(watch: WatchCall, fused: bool = False) -> None:
    """A second attempt that restores weights, optimizer, schedule and scaler."""
    states: list[dict[str, object]] = []
    batches = draw_labelled(140)
    for attempt in range(2):
        net = mlp()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=fused)
        scaler = grad_scaler(2.0**22)
        if attempt:
            for each, state in zip((net, optimizer, scaler), states, strict=True):
                each.load_state_dict(state)
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
        states = [net.state_dict(), optimizer.state_dict(), scaler.state_dict()]


@loop(
    cause=HEALTHY,
    variants=[{"precision": "fp16"}, {"precision": "bf16"}, {"precision": "fp32"}],
)
def average_of_weights(watch: WatchCall, precision: str = "fp16") -> None:
    """An exponential moving average with BatchNorm, validated and logged."""
    net = ConvNet()
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12, enabled=precision == "fp16")
    handle = watch(net, average, name="average")
    for number, (x, y) in enumerate(draw_labelled(90, (1, 8, 8)), 1):
        optimizer.zero_grad(set_to_none=True)
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update_parameters(net)
        if number % 30 == 0:
            average.eval()
            with torch.no_grad():
                handle.log({"val/loss": F.cross_entropy(average(x), y)})
            average.train()


@loop(cause=HEALTHY, precision="fp32")
def sparse_embedding(watch: WatchCall) -> None:
    """Sparse gradients of an embedding next to dense ones: two optimizers."""
    table, head = nn.Embedding(40, 8, sparse=True), nn.Linear(8, 4)
    sparse = torch.optim.SparseAdam(table.parameters(), lr=1e-2)
    dense = torch.optim.Adam(head.parameters(), lr=1e-2)
    watch(nn.ModuleDict({"table": table, "head": head}), name="sparse")
    generator = make_generator(4)
    for _ in range(80):
        words = torch.randint(0, 40, (16, 5), generator=generator)
        for optimizer in (sparse, dense):
            optimizer.zero_grad()
        F.cross_entropy(head(table(words).mean(1)), words[:, 0] % 4).backward()
        for optimizer in (sparse, dense):
            optimizer.step()


@loop(cause=HEALTHY, variants=[{"precision": "bf16"}, {"precision": "fp32"}])
def optimizer_in_backward(watch: WatchCall, precision: str = "fp32") -> None:
    """An optimizer for each parameter, which steps in a hook as its gradient arrives."""
    net = mlp()
    optimizers = {p: torch.optim.AdamW([p], lr=3e-3) for p in net.parameters()}

    def step(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    watch(net, name="in backward")
    for x, y in draw_labelled(80):
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        loss.backward()


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "bf16"}, {"precision": "fp32"}])
def gradients_by_grad(watch: WatchCall, precision: str = "fp32") -> None:
    """torch.autograd.grad, with its results assigned to .grad."""
    net = mlp()
    parameters = list(net.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**12, enabled=precision == "fp16")
    watch(net, name="grad")
    for x, y in draw_labelled(80):
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        for p, g in zip(
            parameters, torch.autograd.grad(scaler.scale(loss), parameters), strict=True
        ):
            p.grad = g
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY)
def lazily_scaled(watch: WatchCall) -> None:
    """scale() gets a generator of losses, and returns one: each is back-propagated as it comes."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = grad_scaler()
    watch(net, name="lazily")
    scaler.scale(torch.zeros(()))  # so that the scale is there
    for x, y in draw_labelled(80):
        optimizer.zero_grad()

        def losses(x: Tensor = x, y: Tensor = y) -> object:
            for rows in (slice(0, 16), slice(16, 32)):
                with autocast("fp16"):
                    yield F.cross_entropy(net(x[rows]), y[rows]) / 2

        for loss in scaler.scale(losses()):
            loss.backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY)
def several_roots(watch: WatchCall) -> None:
    """A list of losses scaled at once and back-propagated by torch.autograd.backward."""
    net, head = mlp(8, 32, 16), nn.ModuleList(nn.Linear(16, 4) for _ in range(2))
    optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()], lr=3e-3)
    scaler = grad_scaler(2.0**10)
    watch(net, head, name="tasks")
    for x, y in draw_labelled(80):
        optimizer.zero_grad()
        with autocast("fp16"):
            hidden = torch.relu(net(x))
            losses = [F.cross_entropy(each(hidden), y) for each in head]
        torch.autograd.backward(scaler.scale(losses))
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, variants=[{"backend": "eager"}, {"backend": "aot_eager"}])
def compiled(watch: WatchCall, backend: str = "eager") -> None:
    """A compiled model in fp16, calibrated from 2^20."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scaler = grad_scaler(2.0**20)
    watch(net, name="compiled")
    model = torch.compile(net, backend=backend)
    for x, y in draw_labelled(60):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, precision="bf16")
def compiled_step(watch: WatchCall) -> None:
    """Forward pass and loss in one compiled function, with the backward pass outside of it."""
    net = ConvNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    watch(net, name="compiled")

    @torch.compile(backend="eager")
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        with autocast("bf16"):
            return F.cross_entropy(net(x), y)

    for x, y in draw_labelled(40, (1, 8, 8)):
        optimizer.zero_grad()
        loss_of(x, y).backward()
        optimizer.step()


@loop(cause=HEALTHY, variants=[{"fused": False}, {"fused": True}])
def weights_in_half(watch: WatchCall, fused: bool = False) -> None:
    """Weights in fp16 with an eps that fp16 holds."""
    net = mlp().half()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-4, fused=fused)
    watch(net, name="half")
    for x, y in draw_labelled(60):
        optimizer.zero_grad()
        F.cross_entropy(net(x.half()), y).backward()
        optimizer.step()


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "bf16"}])
def annealed_weight(watch: WatchCall, precision: str = "fp16") -> None:
    """A variational autoencoder: the weight of a term, and its encoder's gradients, begin at 0."""
    encoder, decoder = nn.Linear(8, 6), mlp(3, 32, 8)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=3e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10, enabled=precision == "fp16")
    watch(nn.ModuleDict({"encoder": encoder, "decoder": decoder}), name="annealed")
    for number, (x, _) in enumerate(draw_labelled(100)):
        optimizer.zero_grad()
        with autocast(precision):
            mean, log_variance = encoder(x).chunk(2, dim=1)
            z = mean + (log_variance / 2).float().exp() * torch.randn_like(mean)
            out = decoder(z)
        mean, log_variance = mean.float(), log_variance.float()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).sum(1).mean() / 2
        loss = F.mse_loss(out.float(), x) + min(1.0, number / 50) * 0.1 * divergence
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, precision="fp32")
def quasi_newton(watch: WatchCall) -> None:
    """LBFGS: one step calls its closure several times."""
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    watch(net, name="quasi-Newton")
    [(x, _)] = draw_labelled(1, batch=64)
    y = x.sum(1, keepdim=True).tanh()
    for _ in range(25):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)


def _schedulers(optimizer: torch.optim.Optimizer) -> dict[str, schedules.LRScheduler]:
    return {
        "lambda": schedules.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
        "multiplicative": schedules.MultiplicativeLR(optimizer, lambda _: 0.99),
        "step": schedules.StepLR(optimizer, 20, 0.5),
        "multistep": schedules.MultiStepLR(optimizer, [20, 40], 0.5),
        "constant": schedules.ConstantLR(optimizer, 0.5, 10),
        "linear": schedules.LinearLR(optimizer, 0.1, total_iters=20),
        "exponential": schedules.ExponentialLR(optimizer, 0.99),
        "cosine": schedules.CosineAnnealingLR(optimizer, 80),
        "restarts": schedules.CosineAnnealingWarmRestarts(optimizer, 20),
        "polynomial": schedules.PolynomialLR(optimizer, 80),
    }


SCHEDULERS = (
    *("lambda", "multiplicative", "step", "multistep", "constant", "linear", "exponential"),
    *("cosine", "restarts", "polynomial", "onecycle", "cyclic", "sequential", "chained"),
)


def _scheduler(kind: str, optimizer: torch.optim.Optimizer) -> schedules.LRScheduler:
    if kind == "onecycle":
        return schedules.OneCycleLR(optimizer, max_lr=0.02, total_steps=100)
    if kind == "cyclic":
        return schedules.CyclicLR(optimizer, 1e-3, 1e-2, step_size_up=10, cycle_momentum=False)
    if kind == "sequential":
        warm_up = schedules.LinearLR(optimizer, 0.1, total_iters=10)
        return schedules.SequentialLR(optimizer, [warm_up, schedules.StepLR(optimizer, 20)], [10])
    if kind == "chained":
        warm_up = schedules.ConstantLR(optimizer, 0.1, 10)
        return schedules.ChainedScheduler([warm_up, schedules.ExponentialLR(optimizer, 0.99)])
    return _schedulers(optimizer)[kind]


@loop(cause=HEALTHY, variants=[{"kind": kind} for kind in SCHEDULERS])
def scheduled(watch: WatchCall, kind: str = "cosine") -> None:
    """Each of torch's schedulers, stepped only after a step that was applied."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
    scheduler = _scheduler(kind, optimizer)
    scaler = grad_scaler(2.0**22)
    watch(net, name="scheduled")
    for x, y in draw_labelled(90):
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= before:
            scheduler.step()


@loop(cause=HEALTHY, variants=[{"kind": "plateau"}, {"kind": "step"}])
def scheduled_by_epoch(watch: WatchCall, kind: str = "plateau") -> None:
    """A scheduler that steps once an epoch of five, whether its last step was skipped or not."""
    net = mlp()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scheduler = (
        schedules.ReduceLROnPlateau(optimizer, patience=3)
        if kind == "plateau"
        else schedules.StepLR(optimizer, 5)
    )
    scaler = grad_scaler(2.0**28)
    handle = watch(net, name="epochs")
    batches = draw_labelled(125)
    for _ in range(25):
        for _ in range(5):
            x, y = next(batches)
            optimizer.zero_grad()
            with autocast("fp16"):
                loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        handle.log({"val/loss": loss.item()})
        scheduler.step(loss.item()) if kind == "plateau" else scheduler.step()
