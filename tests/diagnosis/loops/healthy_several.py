"""Sound loops of several networks, optimizers, backward passes a step, or processes."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.parts import DEVICE, autocast, draw_labelled, grad_scaler, make_generator, mlp
from tests.diagnosis.registry import HEALTHY, WatchCall, loop


def _noise(steps: int) -> list[Tensor]:
    generator = make_generator(9)
    return [torch.randn(16, 4, generator=generator) for _ in range(steps)]


@loop(
    cause=HEALTHY,
    variants=[{"precision": "fp16"}, {"precision": "fp16", "scalers": 2}, {"precision": "fp32"}],
)
def adversarial(watch: WatchCall, precision: str = "fp16", scalers: int = 1) -> None:
    """A GAN: real and fake passes of the discriminator, then the generator through it."""
    generator, discriminator = mlp(4, 32, 8), mlp(8, 32, 1)
    g = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    d = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    made = [
        torch.amp.GradScaler(DEVICE, init_scale=2.0**8, enabled=precision == "fp16")
        for _ in range(scalers)
    ]
    watch(nn.ModuleDict({"g": generator, "d": discriminator}), name="adversarial")
    one, zero = torch.ones(16, 1), torch.zeros(16, 1)
    for (x, _), z in zip(draw_labelled(60, batch=16), _noise(60), strict=True):
        d.zero_grad()
        with autocast(precision):
            fake = generator(z)
            real_loss = F.binary_cross_entropy_with_logits(discriminator(x).float(), one)
            out = discriminator(fake.detach()).float()
            fake_loss = F.binary_cross_entropy_with_logits(out, zero)
        made[0].scale(real_loss).backward()
        made[0].scale(fake_loss).backward()
        made[0].step(d)
        g.zero_grad()
        with autocast(precision):
            out = discriminator(fake).float()
            loss = F.binary_cross_entropy_with_logits(out, one)
        made[-1].scale(loss).backward()
        made[-1].step(g)
        for each in made:
            each.update()


@loop(cause=HEALTHY, precision="fp32", variants=[{"critic": 5}, {"critic": 2}])
def several_critic_steps(watch: WatchCall, critic: int = 5) -> None:
    """A Wasserstein GAN: several steps of the critic, whose weights are clamped, to one."""
    generator, network = mlp(4, 32, 8), mlp(8, 32, 1)
    g = torch.optim.RMSprop(generator.parameters(), lr=1e-3)
    c = torch.optim.RMSprop(network.parameters(), lr=1e-3)
    watch(nn.ModuleDict({"generator": generator, "critic": network}), name="critic")
    for number, ((x, _), z) in enumerate(
        zip(draw_labelled(90, batch=16), _noise(90), strict=True), 1
    ):
        c.zero_grad()
        (network(generator(z).detach()).mean() - network(x).mean()).backward()
        c.step()
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.clamp_(-0.1, 0.1)
        if number % critic == 0:
            g.zero_grad()
            (-network(generator(z)).mean()).backward()
            g.step()


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "fp32"}])
def gradient_penalty(watch: WatchCall, precision: str = "fp16") -> None:
    """A penalty on the norm of a gradient, by torch.autograd.grad as PyTorch documents it."""
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8, enabled=precision == "fp16")
    watch(net, name="penalty")
    for x, _ in draw_labelled(70):
        x.requires_grad_()
        optimizer.zero_grad()
        with autocast(precision):
            out = net(x).float()
        scaled = torch.autograd.grad(scaler.scale(out.sum()), x, create_graph=True)[0]
        gradient = scaled.float() / scaler.get_scale()
        penalty = ((gradient.square().sum(1) + 1e-12).sqrt() - 1).square().mean()
        loss = (out - x.detach().sum(1, keepdim=True)).square().mean() + 0.1 * penalty
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


class Agent(nn.Module):
    """A policy of four actions and a value."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.policy, self.value = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        return self.policy(hidden).float(), self.value(hidden).float().squeeze(1)


@loop(cause=HEALTHY, variants=[{"precision": "fp16"}, {"precision": "bf16"}, {"precision": "fp32"}])
def proximal_policy(watch: WatchCall, precision: str = "fp32") -> None:
    """PPO: actions drawn without a gradient, then epochs of mini-batches, clipped."""
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=1e-3, eps=1e-5)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**8, enabled=precision == "fp16")
    handle = watch(agent, name="policy")
    for x, best in draw_labelled(10, batch=64):
        with torch.no_grad():
            logits, value = agent(x)
            policy = torch.distributions.Categorical(logits=logits)
            action = policy.sample()
            old, reward = policy.log_prob(action), (action == best).float()
            advantage = reward - value
        handle.log({"reward": reward.mean()})
        for _ in range(4):
            for rows in torch.randperm(64).split(32):
                optimizer.zero_grad()
                with autocast(precision):
                    logits, value = agent(x[rows])
                policy = torch.distributions.Categorical(logits=logits)
                ratio = (policy.log_prob(action[rows]) - old[rows]).exp()
                gain = torch.min(
                    ratio * advantage[rows], ratio.clamp(0.8, 1.2) * advantage[rows]
                ).mean()
                loss = F.mse_loss(value, reward[rows]) - gain - 0.01 * policy.entropy().mean()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                scaler.step(optimizer)
                scaler.update()


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation around a base optimizer, as its best-known code has it."""

    def __init__(self, params: object, base: type[torch.optim.Optimizer], **options: float) -> None:
        super().__init__(params, {"rho": 0.05, **options})
        self.base = base(self.param_groups, **options)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        parameters = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for parameter in parameters:
            ascent = parameter.grad * (self.param_groups[0]["rho"] / (norm + 1e-12))
            parameter.add_(ascent)
            self.state[parameter]["ascent"] = ascent
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if "ascent" in self.state[parameter]:
                    parameter.sub_(self.state[parameter]["ascent"])
        self.base.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        self.first_step()
        closure()
        self.second_step()


@loop(
    cause=HEALTHY,
    precision="fp32",
    variants=[{"precision": "fp32"}, {"precision": "bf16"}, {"precision": "fp32", "closure": True}],
)
def sharpness_aware(watch: WatchCall, precision: str = "fp32", closure: bool = False) -> None:
    """Ascent and descent: two backward passes for one update, by two calls or by a closure."""
    net = mlp()
    optimizer = SAM(net.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    watch(net, name="sharpness")
    for x, y in draw_labelled(60):

        def loss_of(x: Tensor = x, y: Tensor = y) -> Tensor:
            with autocast(precision):
                loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss

        loss_of()
        if closure:
            optimizer.step(loss_of)
        else:
            optimizer.first_step()
            loss_of()
            optimizer.second_step()


@loop(cause=HEALTHY)
def sharpness_aware_scaled(watch: WatchCall) -> None:
    """Under a scaler: the ascent uses unscaled gradients without a step, the descent is a step."""
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    parameters = list(net.parameters())
    scaler = grad_scaler(2.0**10)
    watch(net, name="sharpness")
    for x, y in draw_labelled(60):
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in parameters]).norm()
            ascents = [p.grad * (0.05 / (norm + 1e-12)) for p in parameters]
            torch._foreach_add_(parameters, ascents)
        scaler.update()
        optimizer.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(net(x), y)
        scaler.scale(loss).backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, ascents)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@loop(cause=HEALTHY, variants=[{"precision": "bf16"}, {"precision": "fp32"}])
def orthogonal_updates(watch: WatchCall, precision: str = "bf16") -> None:
    """Muon for the matrices, and AdamW for all the rest."""
    net = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.ReLU(), nn.Linear(32, 4))
    matrices = [p for p in net.parameters() if p.ndim == 2]
    others = [p for p in net.parameters() if p.ndim != 2]
    optimizers = [
        torch.optim.Muon(matrices, lr=2e-2),
        torch.optim.AdamW(others, lr=3e-3),
    ]
    watch(net, name="orthogonal")
    for x, y in draw_labelled(80):
        with autocast(precision):
            loss = F.cross_entropy(net(x), y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        net.zero_grad(set_to_none=True)


@loop(cause=HEALTHY)
def both_backward_then_both_step(watch: WatchCall) -> None:
    """Two losses are back-propagated, and only then both optimizers step, at different rates."""
    actor, critic = mlp(), mlp(8, 32, 1)
    first = torch.optim.AdamW(actor.parameters(), lr=1e-3)
    second = torch.optim.SGD(critic.parameters(), lr=0.01)
    scaler = grad_scaler(2.0**10)
    watch(nn.ModuleDict({"actor": actor, "critic": critic}), name="both")
    for x, y in draw_labelled(80):
        first.zero_grad()
        second.zero_grad()
        with autocast("fp16"):
            loss = F.cross_entropy(actor(x), y)
            other = F.mse_loss(critic(x).float(), x.sum(1, keepdim=True))
        scaler.scale(loss).backward()
        scaler.scale(other).backward()
        for optimizer in (first, second):
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_([*actor.parameters(), *critic.parameters()], 1.0)
        for optimizer in (first, second):
            scaler.step(optimizer)
        scaler.update()


def _parallel(watch: WatchCall, precision: str) -> None:
    net = mlp()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**20, enabled=precision == "fp16")
    watch(net, name="parallel")
    for x, y in draw_labelled(50, seed=1 + dist.get_rank()):
        optimizer.zero_grad()
        with autocast(precision):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


@loop(cause=HEALTHY, processes=2, variants=[{"precision": "fp16"}, {"precision": "bf16"}])
def data_parallel(watch: WatchCall, precision: str = "fp16") -> None:
    """DistributedDataParallel over gloo, in two processes."""
    _parallel(watch, precision)


@loop(cause=HEALTHY)
def data_parallel_of_one(watch: WatchCall) -> None:
    """DistributedDataParallel of a single process, calibrated from 2^20."""
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        _parallel(watch, "fp16")
    finally:
        dist.destroy_process_group()


@loop(cause=HEALTHY, processes=2, variants=[{"precision": "bf16"}, {"precision": "fp32"}])
def fully_sharded(watch: WatchCall, precision: str = "bf16") -> None:
    """FSDP2 over gloo in two processes, in bf16 by its own policy or in fp32."""
    net = mlp()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if precision == "bf16" else None)
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (net[0], net[2], net):
        fully_shard(part, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    watch(net, name="sharded")
    for x, y in draw_labelled(40, seed=1 + dist.get_rank()):
        optimizer.zero_grad()
        F.cross_entropy(net(x).float(), y).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()


@loop(cause=HEALTHY)
def critic_without_the_scaler(watch: WatchCall) -> None:
    """The critic trains in fp32 without a scaler; the scaled generator's loss passes through it."""
    generator, critic = mlp(4, 16, 2), mlp(2, 16, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    scaler = grad_scaler()
    watch(generator, critic, name="gan")
    noise, real = make_generator(1), torch.ones(32, 1)
    for x, _ in draw_labelled(100):
        with autocast("fp16"):
            fake = generator(torch.randn(32, 4, generator=noise))
        of_critic.zero_grad()
        loss = F.binary_cross_entropy_with_logits(critic(x[:, :2]), real)
        against = critic(fake.detach().float())
        (loss + F.binary_cross_entropy_with_logits(against, 1 - real)).backward()
        of_critic.step()
        of_generator.zero_grad()
        with autocast("fp16"):
            fooled = F.binary_cross_entropy_with_logits(critic(fake), real)
        scaler.scale(fooled).backward()
        scaler.step(of_generator)
        scaler.update()
