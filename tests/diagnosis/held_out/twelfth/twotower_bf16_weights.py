"""Two-tower retrieval fine-tuned in pure bf16 (weights, gradients, optimiser), step-wise decay."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(50)

USERS, ITEMS, DIM = 120, 200, 32


class Tower(nn.Module):
    def __init__(self, rows, dim=DIM):
        super().__init__()
        self.table = nn.Embedding(rows, dim)
        nn.init.normal_(self.table.weight, std=1.0)
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, ids):
        e = self.table(ids)
        return F.normalize((e * self.scale).float(), dim=-1)


class Retrieval(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(USERS), Tower(ITEMS)

    def forward(self, users, items):
        return self.user(users) @ self.item(items).t() / 0.1


class Clicks:
    def __init__(self, seed=4):
        self.g = torch.Generator().manual_seed(seed)
        self.taste = torch.randn(USERS, 6, generator=self.g)
        self.topic = torch.randn(ITEMS, 6, generator=self.g)

    def batch(self, n=64):
        u = torch.randint(0, USERS, (n,), generator=self.g)
        gumbel = -torch.log(-torch.log(torch.rand(n, ITEMS, generator=self.g).clamp(1e-6, 1 - 1e-6)))
        return u, (2.0 * self.taste[u] @ self.topic.t() + gumbel).argmax(1)


model = Retrieval().to(torch.bfloat16)  # CAUSE
MODULES = [model]
watch(*MODULES)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)  # CAUSE
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[36], gamma=0.04)
clicks = Clicks()
smooth = None
for step in range(96):
    users, items = clicks.batch()
    logits = model(users, items)
    same = items.unsqueeze(0) == items.unsqueeze(1)
    same.fill_diagonal_(False)
    loss = F.cross_entropy(logits.masked_fill(same, -math.inf), torch.arange(len(users)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    smooth = loss.item() if smooth is None else 0.9 * smooth + 0.1 * loss.item()
    if step % 12 == 11:
        print(f"step {step} lr {schedule.get_last_lr()[0]:.2e} loss {smooth:.4f}")
