import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(101)


class RunningNorm(nn.Module):
    """Streaming observation statistics (parallel variance update)."""

    def __init__(self, d):
        super().__init__()
        self.register_buffer("mean", torch.zeros(d))
        self.register_buffer("m2", torch.zeros(d))
        self.register_buffer("count", torch.tensor(1e-4))

    @torch.no_grad()
    def update(self, x):
        n = x.size(0)
        bm = x.mean(0)
        sq = ((x - bm) ** 2).sum(0)  # CAUSE
        tot = self.count + n
        delta = bm.float() - self.mean
        self.m2 += sq.float() + delta ** 2 * self.count * n / tot  # CAUSE
        self.mean += delta * n / tot
        self.count.copy_(tot)

    def forward(self, x):
        return ((x - self.mean) * (self.m2 / self.count).sqrt() / (self.m2 / self.count + 0.1)).clamp(-8, 8)  # CAUSE


class Agent(nn.Module):
    def __init__(self, d, a):
        super().__init__()
        self.enc = nn.Linear(d, 32)
        self.rms = RunningNorm(32)
        self.pi = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, a))

    def forward(self, obs, learn_stats):
        f = self.enc(obs)
        z = self.rms(f)
        if learn_stats:
            self.rms.update(f.detach())
        return self.pi(z)


def sensor_batch(g, i, n=32, d=10):
    obs = torch.randn(n, d, generator=g) * torch.linspace(0.5, 20, d)
    if i == 37:
        obs[3] *= 60.0                 # range sensor returned millimetres instead of metres
    good = (obs[:, :3].sum(1) > 0).long() + 2 * (obs[:, 3] > 0).long()
    return obs, good


agent = Agent(10, 4)
MODULES = [agent]
opt = torch.optim.Adam(agent.parameters(), 3e-3)
sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.2, total_iters=70)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
g = torch.Generator().manual_seed(55)
agent.rms.update(agent.enc(sensor_batch(g, 0)[0]).detach())
watch(*MODULES)
for i in range(1, 71):
    obs, good = sensor_batch(g, i)
    with torch.autocast("cpu", dtype=torch.float16):
        logp = agent(obs, learn_stats=True).float().log_softmax(-1)
    act = torch.multinomial(logp.detach().exp().nan_to_num(0.25), 1, generator=g).squeeze(1)
    rew = (act == good).float()
    adv = rew - rew.mean()
    pg = -(logp.gather(1, act[:, None]).squeeze(1) * adv).mean()
    loss = pg + 0.01 * (logp.exp() * logp).sum(-1).mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    sched.step()
    if i % 10 == 0:
        print(i, rew.mean().item(), loss.item())
