import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3)


def newton_schulz(G, steps=5, eps=1e-8):
    a, b, c = 3.4445, -4.7750, 2.0315
    X = G.to(torch.float16)
    if G.size(0) > G.size(1):
        X = X.T
    X = X / (X.norm() + eps)  # CAUSE
    for _ in range(steps):
        A = X @ X.T
        X = a * X + (b * A + c * A @ A) @ X
    if G.size(0) > G.size(1):
        X = X.T
    return X.to(G.dtype)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                buf = state.setdefault("momentum_buffer", torch.zeros_like(p))
                buf.lerp_(p.grad, 1 - group["momentum"])
                u = newton_schulz(p.grad.lerp(buf, group["momentum"]))
                p.add_(u, alpha=-group["lr"] * max(1, p.size(0) / p.size(1)) ** 0.5)


class TwoModal(nn.Module):
    def __init__(self):
        super().__init__()
        self.vis = nn.Linear(24, 32, bias=False)
        self.aud = nn.Linear(16, 32, bias=False)
        self.trunk = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 64, bias=False), nn.SiLU(), nn.Linear(64, 32, bias=False))
        self.head = nn.Linear(32, 6)

    def forward(self, x, modality):
        h = self.vis(x) if modality == "v" else self.aud(x)
        return self.head(h + self.trunk(h))


gen = torch.Generator().manual_seed(17)
Wv, Wa = torch.randn(24, 6, generator=gen), torch.randn(16, 6, generator=gen)


def sample(W, n=48):
    x = torch.randn(n, W.size(0), generator=gen)
    return x, (x @ W).argmax(1)


AUDIO_FROM, AUDIO_RAMP = 25, 15
model = TwoModal()
MODULES = [model]
mats = [p for n, p in model.named_parameters() if p.ndim == 2 and "head" not in n]
rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "head" in n]
muon, adam = Muon(mats, lr=0.02), torch.optim.Adam(rest, lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
watch(*MODULES)

for step in range(70):
    with torch.autocast("cpu", dtype=torch.float16):
        xv, yv = sample(Wv)
        loss = F.cross_entropy(model(xv, "v").float(), yv)
        if step >= AUDIO_FROM:
            w = min(1.0, (step - AUDIO_FROM) / AUDIO_RAMP)
            xa, ya = sample(Wa)
            loss = loss + w * F.cross_entropy(model(xa, "a").float(), ya)
    muon.zero_grad(set_to_none=True)
    adam.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(muon)
    scaler.step(adam)
    scaler.update()
    if step % 10 == 0:
        print(f"step {step:3d} loss {loss.item():.4f} scale {scaler.get_scale():g}")
