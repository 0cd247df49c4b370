# Tremor window classifier, all weights in half, float32 masters kept by hand, static loss scale.
import copy
import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(21)
gen = torch.Generator().manual_seed(1234)
DIM, WIN, CLASSES, LOSS_SCALE = 48, 20, 5, 64.0

class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x):
        ms = x.square().mean(dim=-1, keepdim=True) + self.eps
        inv = torch.rsqrt(ms)  # CAUSE
        return x * inv * self.gain

class Mixer(nn.Module):
    def __init__(self, dim, win):
        super().__init__()
        self.n1, self.n2 = RMSNorm(dim), RMSNorm(dim)
        self.time = nn.Linear(win, win)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        x = x + self.time(self.n1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.down(F.gelu(self.up(self.n2(x))))

class TremorNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(6, DIM, bias=False)
        self.blocks = nn.ModuleList(Mixer(DIM, WIN) for _ in range(2))
        self.out = nn.Linear(DIM, CLASSES)

    def forward(self, x):
        h = self.stem(x)
        for blk in self.blocks:
            h = blk(h)
        return self.out(h.mean(1))

def windows(step, n=24):
    y = torch.randint(0, CLASSES, (n,), generator=gen)
    t = torch.arange(WIN) / 10.0
    freq = 1.0 + y.float()
    wave = torch.sin(freq[:, None, None] * t[None, :, None] * 2 + torch.rand(n, 1, 6, generator=gen))
    x = wave + 0.3 * torch.randn(n, WIN, 6, generator=gen)
    if step >= 20 and step % 9 == 2:           # sessions of patients at rest
        x[: n // 4] *= 0.015
    return x, y

model = TremorNet()
master = copy.deepcopy(model)
model.half()
MODULES = [model, master]
optimizer = torch.optim.Adam(master.parameters(), lr=2e-3)

def sync_to_half():
    with torch.no_grad():
        for p, m in zip(model.parameters(), master.parameters()):
            p.copy_(m)

def grads_to_master():
    ok = True
    for p, m in zip(model.parameters(), master.parameters()):
        m.grad = p.grad.float() / LOSS_SCALE
        ok = ok and bool(torch.isfinite(m.grad).all())
        p.grad = None
    return ok

watch(*MODULES)
dropped = []
for step in range(1, 91):
    x, y = windows(step)
    logits = model(x.half())
    loss = F.cross_entropy(logits.float(), y)
    (loss * LOSS_SCALE).backward()
    if grads_to_master():
        torch.nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        sync_to_half()
    else:
        dropped.append(step)
    optimizer.zero_grad()
    if step % 30 == 0:
        acc = (logits.argmax(-1) == y).float().mean()
        print(f"step {step} loss {loss.item():.3f} acc {acc:.2f} dropped {dropped}")
