"""Offline actor-critic (TD3+BC flavour) on logged locomotion data kept in a compact replay memory."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(0)
OBS, ACT = 12, 3


class RunningObsNorm(nn.Module):
    def __init__(self, dim, momentum=0.02):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))

    @torch.no_grad()
    def update(self, obs):
        batch_mean = obs.mean(0)
        second = (obs * obs).mean(0)  # CAUSE
        batch_var = second.float() - batch_mean.float() ** 2
        self.mean.lerp_(batch_mean.float(), self.momentum)
        self.var.lerp_(batch_var, self.momentum)  # CAUSE

    def forward(self, obs):
        return ((obs.float() - self.mean) * torch.rsqrt(self.var + 1e-5)).clamp(-10, 10)  # CAUSE


class ReplayMemory:
    def __init__(self, size, seed, dtype=torch.float16):
        g = torch.Generator().manual_seed(seed)
        obs = torch.randn(size, OBS, generator=g)
        obs[:, 9:] *= 20.0                      # contact forces, N
        obs[size * 3 // 5, 10] = 312.0          # hard landing
        self.obs = obs.to(dtype)
        self.next_obs = (0.9 * obs).clamp(-150, 150).to(dtype)
        self.act = torch.tanh(obs[:, :ACT] * 0.7).to(dtype)
        self.rew = (-obs[:, :4].pow(2).sum(1) * 0.1).to(dtype)

    def minibatch(self, i, n=32):
        s = slice(i * n, (i + 1) * n)
        return self.obs[s], self.act[s], self.rew[s], self.next_obs[s]


def mlp(i, o, h=64):
    return nn.Sequential(nn.Linear(i, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU(), nn.Linear(h, o))


norm, actor, critic = RunningObsNorm(OBS), mlp(OBS, ACT), mlp(OBS + ACT, 1)
critic_target = copy.deepcopy(critic).requires_grad_(False)
MODULES = [norm, actor, critic, critic_target]
opt = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=2000)


def train(memory, updates=60):
    watch(*MODULES)
    for i in range(updates):
        obs, act, rew, nxt = memory.minibatch(i)
        norm.update(obs)
        with torch.autocast("cpu", dtype=torch.float16):
            s, s2 = norm(obs), norm(nxt)
            with torch.no_grad():
                q2 = critic_target(torch.cat([s2, torch.tanh(actor(s2))], -1)).squeeze(-1)
                target = rew.float() + 0.97 * q2.float()
            q = critic(torch.cat([s, act.float()], -1)).squeeze(-1)
            bc = F.mse_loss(torch.tanh(actor(s)), act.float())
            loss = F.mse_loss(q, target) + bc
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        with torch.no_grad():
            for p, tp in zip(critic.parameters(), critic_target.parameters()):
                tp.lerp_(p, 0.01)
        if i % 10 == 9:
            print(f"update {i + 1} loss {loss.item():.4f} bc {bc.item():.4f}")


train(ReplayMemory(60 * 32, seed=4))
