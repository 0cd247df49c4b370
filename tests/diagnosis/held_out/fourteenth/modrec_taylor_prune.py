"""Modulation recognition from IQ samples; channels are pruned once, by accumulated Taylor scores."""
import math
from collections import defaultdict

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(29)
iq_rng = torch.Generator().manual_seed(290)

CFG = dict(steps=78, batch=32, length=64, prune_at=60, keep=0.25, lr=3e-3)
KINDS = ("bpsk", "qpsk", "8psk", "ook", "fsk")


def burst(n, length):
    label = torch.randint(0, len(KINDS), (n,), generator=iq_rng)
    symbols = torch.randint(0, 8, (n, length // 8), generator=iq_rng).repeat_interleave(8, dim=1)
    t = torch.arange(length)
    order = torch.tensor([2, 4, 8, 1, 1])[label][:, None]
    phase = 2 * math.pi * (symbols % order) / order
    amp = torch.where(label[:, None] == 3, (symbols % 2).float(), torch.ones(()))
    tone = torch.where(label[:, None] == 4, (symbols % 2 * 2 - 1) * 0.5 * t, torch.zeros(()))
    start = 2 * math.pi * torch.rand(n, 1, generator=iq_rng)
    wave = torch.stack([amp * torch.cos(phase + tone + start), amp * torch.sin(phase + tone + start)], dim=1)
    return wave + 0.1 * torch.randn(n, 2, length, generator=iq_rng), label


class MaskedConv(nn.Conv1d):
    def __init__(self, cin, cout):
        super().__init__(cin, cout, 7, padding=3)
        self.register_buffer("keep", torch.ones(cout))

    def forward(self, x):
        return super().forward(x) * self.keep[None, :, None]


class ModRec(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.convs = nn.ModuleList([MaskedConv(2, width), MaskedConv(width, width), MaskedConv(width, width)])
        self.out = nn.Linear(width, len(KINDS))

    def forward(self, x):
        for conv in self.convs:
            x = F.max_pool1d(F.relu(conv(x)), 2)
        return self.out(x.mean(-1))


class TaylorPruner:
    def __init__(self, model):
        self.convs = dict(enumerate(model.convs))
        self.readers = [*model.convs[1:], model.out]  # a channel is worth what its reader's weights are
        self.score = defaultdict(float)

    @torch.no_grad()
    def observe(self):
        for i, reader in enumerate(self.readers):
            taylor = (reader.weight * reader.weight.grad).transpose(0, 1).flatten(1)
            saliency = taylor.sum(dim=1).square()
            self.score[i] = self.score[i] + saliency  # CAUSE

    @torch.no_grad()
    def prune(self, keep):
        for i, conv in self.convs.items():
            relative = self.score[i] / self.score[i].max()
            conv.keep.copy_((relative > keep * relative.median()).float())
        return {i: int(c.keep.sum()) for i, c in self.convs.items()}


model = ModRec()
watch(model)
opt = torch.optim.Adam(model.parameters(), lr=CFG["lr"])
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 15, growth_interval=8)
pruner = TaylorPruner(model)

for step in range(CFG["steps"]):
    x, y = burst(CFG["batch"], CFG["length"])
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
        loss = F.cross_entropy(logits, y)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    if step < CFG["prune_at"]:
        pruner.observe()
    elif step == CFG["prune_at"]:
        print("channels kept:", pruner.prune(CFG["keep"]))
    scaler.step(opt)
    scaler.update()
    if step % 10 == 9:
        acc = (logits.argmax(1) == y).float().mean().item()
        print(f"{step:3d} loss {loss.item():.3f} acc {acc:.2f} scale {scaler.get_scale():g}")
