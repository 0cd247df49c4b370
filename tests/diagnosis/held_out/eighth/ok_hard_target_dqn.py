"""Double DQN with a bfloat16 actor copy that is refreshed every 25 updates; cyclic learning rate with rests."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

import copy

torch.set_num_threads(1)
torch.manual_seed(100)
gen = torch.Generator().manual_seed(101)
SIZE, GAMMA, SYNC = 6, 0.95, 25


def encode(pos):
    return torch.cat([F.one_hot(pos[:, 0], SIZE), F.one_hot(pos[:, 1], SIZE)], 1).float()


def explore(n):
    pos = torch.randint(0, SIZE, (n, 2), generator=gen)
    act = torch.randint(0, 4, (n,), generator=gen)
    delta = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])[act]
    raw = pos + delta
    nxt = raw.clamp(0, SIZE - 1)
    bump = (raw != nxt).any(1)
    goal = (nxt == SIZE - 1).all(1)
    reward = torch.where(goal, 50000.0, torch.where(bump, -2000.0, -500.0))
    return pos, act, reward, nxt, goal


class Q(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * SIZE, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
        self.gain = 1.0e4

    def forward(self, s):
        return self.net(s) * self.gain


q = Q()
frozen = copy.deepcopy(q).bfloat16().requires_grad_(False)
MODULES = [q, frozen]
watch(*MODULES)
opt = torch.optim.Adam(q.parameters(), lr=4e-3)
rests = 0
for n in range(1, 121):
    phase = (n - 1) % 30
    lr = 0.0 if phase >= 27 else 4e-3 * (1 - phase / 30)
    opt.param_groups[0]["lr"] = lr
    rests += lr == 0.0
    pos, act, rew, nxt, goal = explore(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = q(encode(pos)).float().gather(1, act[:, None]).squeeze(1)
        with torch.no_grad():
            pick = q(encode(nxt)).argmax(1, keepdim=True)
    with torch.no_grad():
        bootstrap = frozen(encode(nxt).to(frozen.net[0].weight.dtype)).float().gather(1, pick).squeeze(1)
        target = rew + GAMMA * bootstrap.masked_fill(goal, 0.0)
    loss = F.mse_loss(values, target)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if n % SYNC == 0:
        frozen.load_state_dict(q.state_dict())
    if n % 30 == 0:
        print(f"{n} td error {loss.sqrt().item():.1f} mean value {values.mean().item():.0f} rests {rests}")
