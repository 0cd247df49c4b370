"""Pairwise margin ranking of products; once all pairs are separated the loss is exactly zero."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(90)
gen = torch.Generator().manual_seed(91)
ITEMS, USERS, D = 400, 60, 24
user_taste = torch.randn(USERS, 4, generator=gen)
item_trait = torch.randn(ITEMS, 4, generator=gen)


class Ranker(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, D)
        self.item = nn.Embedding(ITEMS, D)
        self.side = nn.Linear(4, D)
        self.cold_start = nn.Linear(4, D)

    def forward(self, u, i):
        return (self.user(u) * (self.item(i) + self.side(item_trait[i]))).sum(-1)


CATALOGUE = torch.randint(0, ITEMS, (5, 96), generator=gen)


def pairs(k):
    u = torch.arange(96) % USERS
    i, j = CATALOGUE[k % 5], CATALOGUE[(k + 1) % 5]
    better = (user_taste[u] * (item_trait[i] - item_trait[j])).sum(-1) > 0
    return u, torch.where(better, i, j), torch.where(better, j, i)


ranker = Ranker()
MODULES = [ranker]
watch(*MODULES)
opt = torch.optim.Adagrad(ranker.parameters(), lr=0.12)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0, growth_interval=40)
idle = 0
for k in range(120):
    u, pos, neg = pairs(k)
    with torch.autocast("cpu", dtype=torch.float16):
        gap = ranker(u, pos) - ranker(u, neg)
        hinge = F.relu(0.5 - gap)
        active = (hinge > 0).sum()
        loss = hinge.float().sum() / active.clamp(min=1)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    idle += int(active == 0)
    if k % 20 == 19:
        print(f"{k + 1} loss {loss.item():.5f} active pairs {int(active)} idle batches {idle} scale {scaler.get_scale():.0f}")
