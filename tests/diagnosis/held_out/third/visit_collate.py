import math
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(2)


class Visits(Dataset):
    """one customer = list of (day, amount, store); label: comes back within a month"""

    def __init__(self, n=480, seed=4):
        rnd = random.Random(seed)
        self.rows = []
        for i in range(n):
            days, k = [], rnd.randint(2, 7)
            d = 0
            for _ in range(k):
                d += rnd.choice([1, 2, 3, 5, 8, 13])
                days.append(d)
            if i in (233, 391):
                days[1] = days[0]             # two receipts on one day
            items = [(t, rnd.uniform(1, 90), rnd.randrange(12)) for t in days]
            self.rows.append((items, float(sum(a for _, a, _ in items) / k > 45)))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def pad_collate(batch):
    T = max(len(items) for items, _ in batch)
    num = torch.zeros(len(batch), T, 2)
    cat = torch.zeros(len(batch), T, dtype=torch.long)
    mask = torch.zeros(len(batch), T)
    for b, (items, _) in enumerate(batch):
        for t, (day, amount, store) in enumerate(items):
            gap = torch.tensor(float(day - items[t - 1][0] if t else 1))
            num[b, t] = torch.stack([torch.log(gap), torch.tensor(amount / 90)])  # CAUSE
            cat[b, t] = store + 1
            mask[b, t] = 1
    return num, cat, mask, torch.tensor([y for _, y in batch])


class VisitNet(nn.Module):
    def __init__(self, d=32):
        super().__init__()
        self.store = nn.Embedding(13, d, padding_idx=0)
        self.num = nn.Linear(2, d)
        self.enc = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 64), nn.SiLU(), nn.Linear(64, d))
        self.out = nn.Linear(d, 1)

    def forward(self, num, cat, mask):
        h = self.enc(self.store(cat) + self.num(num))
        h = (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        return self.out(h).squeeze(-1)


def train():
    loader = DataLoader(Visits(), batch_size=12, shuffle=False, collate_fn=pad_collate)
    watch(*MODULES)
    step = 0
    for num, cat, mask, y in loader:
        step += 1
        with torch.autocast("cpu", dtype=torch.float16):
            logit = net(num, cat, mask)
        loss = nn.functional.binary_cross_entropy_with_logits(logit.float(), y)
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 10 == 0:
            print(step, math.exp(-loss.item()))


net = VisitNet()
MODULES = [net]
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0)
train()
