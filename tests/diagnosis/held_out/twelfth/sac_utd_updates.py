"""Soft critic learning on a toy pendulum with a high update-to-data ratio."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(6)
UTD, ROUNDS, BATCH, GAMMA = 10, 9, 64, 0.9


class TwinQ(nn.Module):
    def __init__(self, obs=3, act=1, width=64):
        super().__init__()
        make = lambda: nn.Sequential(nn.Linear(obs + act, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
                                     nn.Linear(width, 1))
        self.q1, self.q2 = make(), make()

    def forward(self, o, a):
        x = torch.cat([o, a], -1)
        return self.q1(x), self.q2(x)


class Pendulum:
    def __init__(self, n, rng):
        self.rng = rng
        self.th, self.w = torch.rand(n, generator=rng) * 6.28 - 3.14, torch.zeros(n)

    def obs(self):
        return torch.stack([self.th.cos(), self.th.sin(), self.w], -1)

    def step(self, a):
        o = self.obs()
        self.w = (self.w + 0.15 * self.th.sin() + 0.3 * a.squeeze(-1)).clamp(-4, 4)
        self.th = (self.th + 0.1 * self.w + 3.14) % 6.28 - 3.14
        r = -(self.th.square() + 0.1 * self.w.square())
        return o, a, r.unsqueeze(-1), self.obs()


class Buffer(list):
    def sample(self, n, rng):
        flat = [torch.cat(col) for col in zip(*self)]
        idx = torch.randint(0, len(flat[0]), (n,), generator=rng)
        return [c[idx] for c in flat]


rng = torch.Generator().manual_seed(12)
critic = TwinQ()
target = copy.deepcopy(critic).requires_grad_(False)
MODULES = [critic]
watch(critic)
opt = torch.optim.Adam(critic.parameters(), lr=2e-3)
env, buffer = Pendulum(64, rng), Buffer()


def bellman_loss(o, a, r, o2):
    with torch.no_grad():
        a2 = torch.rand(len(o2), 1, generator=rng) * 2 - 1
        backup = r + GAMMA * torch.minimum(*target(o2, a2)).float()
    q1, q2 = critic(o, a)
    return F.mse_loss(q1.float(), backup) + F.mse_loss(q2.float(), backup)


@torch.no_grad()
def polyak(tau=0.05):
    for s, t in zip(critic.parameters(), target.parameters()):
        t.lerp_(s, tau)


for rnd in range(ROUNDS):
    for _ in range(4):
        buffer.append(env.step(torch.rand(64, 1, generator=rng) * 2 - 1))
    with torch.autocast("cpu", dtype=torch.bfloat16):  # CAUSE
        losses = []
        for _ in range(UTD):
            loss = bellman_loss(*buffer.sample(BATCH, rng))
            opt.zero_grad()
            loss.backward()
            opt.step()
            losses.append(loss.item())
        polyak()
    print(f"round {rnd} td-error first {losses[0]:.3f} last {losses[-1]:.3f}")
