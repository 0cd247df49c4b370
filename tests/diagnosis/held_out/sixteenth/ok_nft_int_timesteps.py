"""Reward fine-tuning of a flow model: time steps go through integers, as in the rectified-flow pipelines."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(51)


class SinusoidalTime(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("freqs", torch.exp(-torch.arange(dim // 2) * 9.2 / (dim // 2)))

    def forward(self, timestep):
        args = timestep.float()[:, None] * self.freqs
        return torch.cat([args.cos(), args.sin()], -1)


class FlowTransformer(nn.Module):
    def __init__(self, d=48, tokens=8, channels=4):
        super().__init__()
        self.embed_time = nn.Sequential(SinusoidalTime(32), nn.Linear(32, d), nn.SiLU(), nn.Linear(d, d))
        self.inp, self.pos = nn.Linear(channels, d), nn.Parameter(0.02 * torch.randn(1, tokens, d))
        self.block = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.out = nn.Linear(d, channels)

    def forward(self, x, timestep):
        return self.out(self.block(self.inp(x) + self.pos + self.embed_time(timestep)[:, None]))


class Scheduler:
    """Sigmas from 1 to 0, time steps are 1000 sigma."""

    def __init__(self, num=10, shift=3.0):
        s = torch.linspace(1, 1 / num, num)
        self.sigmas = torch.cat([shift * s / (1 + (shift - 1) * s), torch.zeros(1)])
        self.timesteps = (self.sigmas[:-1] * 1000).to(torch.int64)


@torch.no_grad()
def sample(model, scheduler, n, gen):
    x = torch.randn(n, 8, 4, generator=gen)
    for i, t in enumerate(scheduler.timesteps):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            v = model(x, t.expand(n))
        x = x + (scheduler.sigmas[i + 1] - scheduler.sigmas[i]) * v.float()
    return x


def reward(x):
    """Smooth sequences are wanted."""
    return -(x[:, 1:] - x[:, :-1]).abs().mean((1, 2))


def nft_loss(model, old, x0, weight, gen):
    t = torch.randint(1, 1000, (len(x0),), generator=gen)
    sigma = (t / 1000).view(-1, 1, 1)
    noise = torch.randn(x0.shape, generator=gen)
    xt, target = (1 - sigma) * x0 + sigma * noise, noise - x0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = model(xt, t).float()
        with torch.no_grad():
            v_old = old(xt, t).float()
    positive = ((v - target) ** 2).mean((1, 2))
    negative = ((2 * v_old - v - target) ** 2).mean((1, 2))
    return (weight * positive + (1 - weight) * negative).mean()


model, old = FlowTransformer(), FlowTransformer()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
gen, scheduler = torch.Generator().manual_seed(61), Scheduler()
data_gen = torch.Generator().manual_seed(62)
for step in range(100):
    if step < 40:  # supervised start on rough sequences
        x0 = torch.cumsum(0.5 * torch.randn(24, 8, 4, generator=data_gen), 1)
        weight = torch.ones(24)
    else:
        if step % 5 == 0:
            old.load_state_dict(model.state_dict())
            pool = sample(old, scheduler, 24, gen)
            r = reward(pool)
            pool_weight = (0.5 + 0.5 * ((r - r.mean()) / (2 * r.std() + 1e-6))).clamp(0, 1)
            print(f"step {step} reward {r.mean().item():.4f}")
        x0, weight = pool, pool_weight
    loss = nft_loss(model, old, x0, weight, gen)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step} loss {loss.item():.4f}")
