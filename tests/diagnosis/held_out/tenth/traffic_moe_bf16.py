"""Traffic speed forecasting with a sparse mixture of experts, bfloat16 autocast, accumulated micro-batches."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(70)
LAGS, HORIZON, SENSORS = 24, 6, 10

class NoisyTopK(nn.Module):
    def __init__(self, dim, experts, k):
        super().__init__()
        self.gate, self.k = nn.Linear(dim, experts, bias=False), k

    def forward(self, x, noise):
        logits = self.gate(x).float()
        if self.training:
            logits = logits - 0.3 * torch.log(-torch.log(noise.clamp(1e-6, 1 - 1e-6)))
        kth = logits.topk(self.k, dim=-1).values[:, -1:]
        return logits.masked_fill(logits < kth, float("-inf")).softmax(-1)

class MoE(nn.Module):
    def __init__(self, dim=48, experts=5, k=2):
        super().__init__()
        self.route = NoisyTopK(dim, experts, k)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))
                                     for _ in range(experts))

    def forward(self, x, noise):
        weights = self.route(x, noise)
        out = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            idx = (weights[:, e] > 0).nonzero().squeeze(-1)
            if idx.numel() == 0:
                continue
            out = out.index_add(0, idx, (expert(x[idx]) * weights[idx, e, None]).to(out.dtype))
        return x + out, weights

class TrafficNet(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.sensor = nn.Embedding(SENSORS, dim)
        self.legacy_scale = nn.Parameter(torch.ones(1))      # kept for old checkpoints
        self.inp, self.out = nn.Linear(LAGS, dim), nn.Linear(dim, HORIZON)
        self.moe = nn.ModuleList([MoE(dim), MoE(dim)])

    def forward(self, lags, sensor, noise):
        h = self.inp(lags) + self.sensor(sensor)
        usage = []
        for layer, u in zip(self.moe, noise):
            h, w = checkpoint(layer, h, u, use_reentrant=False)
            usage.append(w.mean(0))
        return self.out(h), torch.stack(usage)

def series(n, g):
    sensor = torch.randint(0, SENSORS, (n,), generator=g)
    phase = torch.rand(n, 1, generator=g) * 6.28
    t = torch.arange(LAGS + HORIZON) * 0.26
    y = torch.sin(t * (1 + sensor[:, None] * 0.05) + phase) + 0.05 * torch.randn(n, LAGS + HORIZON, generator=g)
    return y[:, :LAGS], sensor, y[:, LAGS:], torch.rand(2, n, 5, generator=g)

model = TrafficNet()
MODULES = [model]
watch(*MODULES)
optim = torch.optim.AdamW(model.parameters(), lr=2e-3)
g = torch.Generator().manual_seed(1)
ACCUM = 3
for step in range(1, 61):
    optim.zero_grad(set_to_none=True)
    for _ in range(ACCUM):
        lags, sensor, target, noise = series(32, g)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            pred, usage = model(lags, sensor, noise)
        balance = (usage - usage.mean()).square().sum()
        loss = F.l1_loss(pred.float(), target) + 0.1 * balance
        (loss / ACCUM).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    if step % 10 == 0:
        print(f"step {step} mae+aux {loss.item():.4f} usage {[round(v, 2) for v in usage[0].tolist()]}")
