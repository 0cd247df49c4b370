"""Bed-type picking on ice-penetrating radar traces, bfloat16, no loss scaling."""
import math

import torch
from torch import nn
from torch.nn import functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3)

EPOCHS, BATCHES, BATCH, SAMPLES, CLASSES = 6, 14, 24, 96, 5
rng = torch.Generator().manual_seed(41)


def trace_batches():
    """Synthetic A-scopes: a decaying clutter and a bed echo whose shape depends on the bed type."""
    t = torch.arange(SAMPLES, dtype=torch.float32)
    for _ in range(BATCHES):
        kind = torch.randint(0, CLASSES, (BATCH,), generator=rng)
        depth = 40 + 36 * torch.rand(BATCH, 1, generator=rng)
        width = 2.0 + 1.7 * kind[:, None]
        echo = torch.exp(-((t - depth) / width) ** 2) * torch.cos(math.pi * (t - depth) / (4 + kind[:, None]))
        clutter = torch.exp(-t / 18) * torch.randn(BATCH, SAMPLES, generator=rng)
        noise = 0.15 * torch.randn(BATCH, SAMPLES, generator=rng)
        yield (echo + 0.5 * clutter + noise).unsqueeze(1), kind


class Trunk(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.stem = nn.Conv1d(1, width, 9, padding=4)
        self.mid = nn.ModuleList(nn.Conv1d(width, width, 5, padding=2 * d, dilation=d) for d in (1, 2, 4))
        self.norms = nn.ModuleList(nn.GroupNorm(4, width) for _ in range(3))
        self.pick = nn.Linear(2 * width, CLASSES)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for conv, norm in zip(self.mid, self.norms):
            x = x + F.relu(norm(conv(x)))
        return self.pick(torch.cat([x.mean(-1), x.amax(-1)], dim=1))


class Fitter:
    def __init__(self, net):
        self.net = net
        self.opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9)
        self.history = []

    def one_batch(self, x, y):
        self.opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.net(x), y)
        loss.backward()
        self.opt.step()
        self.history.append(loss.item())

    def one_epoch(self):
        self.net.train()
        with torch.autocast("cpu", dtype=torch.bfloat16):  # CAUSE
            for x, y in trace_batches():
                self.one_batch(x, y)

    def fit(self):
        for epoch in range(EPOCHS):
            self.one_epoch()
            tail = self.history[-BATCHES:]
            print(f"epoch {epoch} loss {sum(tail) / len(tail):.3f} last {tail[-1]:.3f}")


net = Trunk()
watch(net)
Fitter(net).fit()
