import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(33)


class CPC(nn.Module):
    """conv encoder + GRU context + one bilinear predictor per future step"""

    def __init__(self, d=32, horizon=3):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv1d(1, d, 8, stride=4), nn.ReLU(), nn.Conv1d(d, d, 4, stride=2))
        self.ctx = nn.GRU(d, d, batch_first=True)
        self.pred = nn.ModuleList(nn.Linear(d, d, bias=False) for _ in range(horizon))

    def forward(self, wav):
        z = self.enc(wav.unsqueeze(1)).transpose(1, 2)
        c, _ = self.ctx(z)
        total, hits = 0.0, 0
        for k, w in enumerate(self.pred, 1):
            p = w(c[:, :-k]).reshape(-1, z.size(-1))
            t = z[:, k:].reshape(-1, z.size(-1))
            score = (p @ t.t()).float()
            target = torch.arange(score.size(0))
            total = total + F.cross_entropy(score, target, reduction="sum")
            hits += (score.argmax(1) == target).float().mean().item()
        return total, hits / len(self.pred)


def tones(gen, n=6, length=160):
    f = 0.02 + 0.1 * torch.rand(n, 1, generator=gen)
    ph = 6.28 * torch.rand(n, 1, generator=gen)
    chirp = 1e-4 * torch.randn(n, 1, generator=gen)
    t = torch.arange(length)
    return torch.sin(6.28 * (f * t + chirp * t * t) + ph) + 0.1 * torch.randn(n, length, generator=gen)


class Loop:
    def __init__(self, model, seed=330):
        self.model = model
        self.gen = torch.Generator().manual_seed(seed)
        self.opt = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, backoff_factor=0.98, growth_interval=4000)  # CAUSE

    def step(self):
        with torch.autocast("cpu", dtype=torch.float16):
            loss, acc = self.model(tones(self.gen))
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()  # CAUSE
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 100.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item(), acc


model = CPC()
MODULES = [model]
watch(*MODULES)
loop = Loop(model)
for it in range(60):
    loss, acc = loop.step()
    if it % 15 == 14:
        print(it, round(loss, 2), round(acc, 3))
