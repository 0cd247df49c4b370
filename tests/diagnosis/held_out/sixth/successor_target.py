import copy
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(37)
N, ACTIONS, GAMMA, TAU = 16, 2, 0.9, 0.0005


class SuccessorNet(nn.Module):
    """psi(s, a): discounted expected visits of every state of the ring"""

    def __init__(self, h=48):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(N, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.psi = nn.Linear(h, ACTIONS * N)

    def forward(self, s):
        return self.psi(self.body(s)).view(-1, ACTIONS, N)


class Agent:
    def __init__(self):
        self.online = SuccessorNet()
        self.target = copy.deepcopy(self.online).bfloat16().requires_grad_(False)
        self.opt = torch.optim.Adam(self.online.parameters(), lr=4e-4)

    def soft_update(self):
        src = [p.detach().bfloat16() for p in self.online.parameters()]
        dst = list(self.target.parameters())
        torch._foreach_lerp_(dst, src, TAU)  # CAUSE

    def learn(self, s, a, s2):
        eye = torch.eye(N)
        with torch.no_grad():
            nxt = self.target(eye[s2].to(next(self.target.parameters()).dtype)).float().mean(1)
            goal = eye[s] + GAMMA * nxt
        with torch.autocast("cpu", dtype=torch.bfloat16):
            psi = self.online(eye[s])
        pred = psi.float()[torch.arange(len(s)), a]
        loss = (pred - goal).pow(2).sum(-1).mean()
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.online.parameters(), 5.0)
        self.opt.step()
        self.soft_update()
        return loss.item()


agent = Agent()
MODULES = [agent.online, agent.target]
gen = torch.Generator().manual_seed(4)
watch(*MODULES)

drift0 = torch.cat([p.detach().float().flatten() for p in agent.target.parameters()])
for it in range(120):
    s = torch.randint(0, N, (64,), generator=gen)
    a = torch.randint(0, ACTIONS, (64,), generator=gen)
    s2 = (s + 2 * a - 1) % N
    loss = agent.learn(s, a, s2)
    if it % 30 == 0:
        print(it, round(loss, 4))
drift = torch.cat([p.detach().float().flatten() for p in agent.target.parameters()])
print("target moved", ((drift - drift0) != 0).float().mean().item(), (drift - drift0).norm().item())
