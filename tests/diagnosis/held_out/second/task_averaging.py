import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(14)
gen = torch.Generator().manual_seed(14)
TASKS = ("depth", "normal", "energy")


class MTL(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(2, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 24, 3, stride=2, padding=1), nn.ReLU())
        self.depth = nn.Conv2d(24, 1, 1)
        self.normal = nn.Conv2d(24, 3, 1)
        self.energy = nn.Linear(24, 1)

    def forward(self, x):
        h = self.enc(x)
        return self.depth(h), self.normal(h), self.energy(h.mean((2, 3)))


class RelativeProgress:
    """weights from smoothed losses relative to those of the first step"""

    def __init__(self, n, temperature=2.0, decay=0.8):
        self.n, self.t, self.decay = n, temperature, decay
        self.start = self.smooth = None

    def weights(self):
        if self.start is None:
            return torch.ones(self.n)
        return self.n * torch.softmax(self.smooth / self.start / self.t, 0)  # CAUSE

    def push(self, losses):
        cur = torch.stack([l.detach().float() for l in losses])
        if self.start is None:
            self.start, self.smooth = cur, cur.clone()
        self.smooth = self.decay * self.smooth + (1 - self.decay) * cur  # CAUSE


def batch(bright):
    x = torch.rand(16, 2, 12, 12, generator=gen)
    x[0] = x[0] * (1 + bright)
    pooled = F.avg_pool2d(x, 2)
    depth = pooled[:, :1] + 0.5 * pooled[:, 1:]
    normal = F.normalize(torch.cat([pooled, torch.ones(16, 1, 6, 6)], 1), dim=1)
    return x, depth, normal, x.sum((1, 2, 3))[:, None] / 20


net = MTL()
progress = RelativeProgress(len(TASKS))
MODULES = [net]
watch(*MODULES)
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
for it in range(1, 81):
    x, depth, normal, energy = batch(bright=60.0 if it == 33 else 0.3)
    with torch.autocast("cpu", dtype=torch.float16):
        d, n, e = net(x)
        parts = [
            (d - depth.half()).abs().mean(),
            1 - F.cosine_similarity(n.float(), normal, dim=1).mean(),
            ((e - energy.half()) ** 2).mean(),  # CAUSE
        ]
    w = progress.weights()
    total = sum(wi * li.float() for wi, li in zip(w, parts))
    opt.zero_grad()
    scaler.scale(total).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 2.0)
    scaler.step(opt)
    scaler.update()
    progress.push(parts)
    if it % 10 == 0:
        print(it, " ".join(f"{k}={v.item():.4f}" for k, v in zip(TASKS, parts)), "w", [round(v, 3) for v in w.tolist()])
