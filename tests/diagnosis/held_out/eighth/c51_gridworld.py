"""Categorical DQN (51 atoms) on a corridor; network and replay are kept in bfloat16 to save memory."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


import copy

torch.set_num_threads(1)
torch.manual_seed(12)
gen = torch.Generator().manual_seed(6)
N, ACTIONS, ATOMS = 12, 2, 51
V_MIN, V_MAX, GAMMA = 0.0, 12.5, 0.97


class Categorical(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(N, width), nn.ReLU(), nn.Linear(width, ACTIONS * ATOMS))

    def forward(self, s):
        return self.trunk(s).view(-1, ACTIONS, ATOMS)


def transitions(n):
    pos = torch.randint(0, N, (n,), generator=gen)
    act = torch.randint(0, ACTIONS, (n,), generator=gen)
    nxt = (pos + act * 2 - 1).clamp(0, N - 1)
    rew = torch.where(nxt == N - 1, 10.0, 0.3) + 0.3 * torch.rand(n, generator=gen)
    done = (nxt == N - 1).float()
    return F.one_hot(pos, N).float(), act, rew, F.one_hot(nxt, N).float(), done


def project(prob, rew, done):
    """distribution of r + gamma * z on the fixed support"""
    atoms = torch.linspace(V_MIN, V_MAX, ATOMS).to(prob.dtype)
    delta = (V_MAX - V_MIN) / (ATOMS - 1)
    tz = (rew.to(prob.dtype).unsqueeze(1) + (1 - done.to(prob.dtype)).unsqueeze(1) * GAMMA * atoms).clamp(V_MIN, V_MAX)  # CAUSE
    b = (tz - V_MIN) / delta
    lo, hi = b.floor(), b.ceil()
    out = torch.zeros(prob.shape)
    out.scatter_add_(1, lo.long(), (prob * (hi - b)).float())
    out.scatter_add_(1, hi.long(), (prob * (b - lo)).float())
    return out


online = Categorical().bfloat16()
target = copy.deepcopy(online).requires_grad_(False)
MODULES = [online, target]
opt = torch.optim.SGD(online.parameters(), lr=0.5, momentum=0.9)


def learn(steps):
    watch(*MODULES)
    for k in range(1, steps + 1):
        s, a, r, s2, d = transitions(64)
        s, s2 = s.to(online.trunk[0].weight.dtype), s2.to(online.trunk[0].weight.dtype)
        with torch.no_grad():
            p2 = target(s2).softmax(-1)
            q2 = (p2.float() * torch.linspace(V_MIN, V_MAX, ATOMS)).sum(-1)
            best = p2[torch.arange(len(s2)), q2.argmax(1)]
            m = project(best, r, d)
        logp = online(s)[torch.arange(len(s)), a].float().log_softmax(-1)
        loss = -(m * logp).sum(1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if k % 10 == 0:
            target.load_state_dict(online.state_dict())
        if k in (1, 2, 5) or k % 20 == 0:
            print(f"{k} loss {loss.item():.4f} target mass {m.sum(1).mean().item():.4f}")


learn(100)
