"""Mortality from irregular vitals. Missing readings are NaN in the files and are imputed with a decay to the mean."""
import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)

class RunningMoments(nn.Module):
    """Welford over what was really measured; keeps its sums in fp32."""

    def __init__(self, n):
        super().__init__()
        self.register_buffer("count", torch.zeros(n))
        self.register_buffer("mean", torch.zeros(n))
        self.register_buffer("m2", torch.zeros(n))

    @torch.no_grad()
    def absorb(self, x):
        seen = ~x.isnan()
        k = seen.sum((0, 1)).float()
        mu = x.nanmean((0, 1)).nan_to_num(0.0)
        dev = (x - mu).nan_to_num(0.0).square().sum((0, 1))
        total = (self.count + k).clamp(min=1)
        delta = mu - self.mean
        self.m2 += dev + delta.square() * self.count * k / total
        self.mean += delta * k / total
        self.count += k

    def forward(self, x):
        std = (self.m2 / self.count.clamp(min=2)).sqrt().clamp(min=1e-3)
        return (x - self.mean) / std

class DecayGRU(nn.Module):
    def __init__(self, n, hid=40):
        super().__init__()
        self.moments = RunningMoments(n)
        self.rate = nn.Parameter(torch.zeros(n))
        self.inp = nn.Linear(2 * n, 3 * hid)
        self.rec = nn.Linear(hid, 3 * hid, bias=False)
        self.out = nn.Linear(hid, 1)
        self.hid = hid

    def forward(self, raw):
        seen = ~raw.isnan()
        z = self.moments(raw).nan_to_num(nan=0.0)
        last, age = torch.zeros_like(z[:, 0]), torch.zeros_like(z[:, 0])
        h = z.new_zeros(z.shape[0], self.hid)
        for t in range(z.shape[1]):
            m = seen[:, t]
            last, age = torch.where(m, z[:, t], last), torch.where(m, torch.zeros_like(age), age + 1)
            x = last * torch.exp(-F.softplus(self.rate) * age)
            xr, xz, xn = self.inp(torch.cat([x, m.to(x.dtype)], -1)).chunk(3, -1)
            hr, hz, hn = self.rec(h).chunk(3, -1)
            u = torch.sigmoid(xz + hz)
            h = u * h + (1 - u) * torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
        return self.out(h).squeeze(-1)

def ward(n, gen, steps=12):
    risk = torch.randn(n, generator=gen)
    base = torch.tensor([85.0, 120.0, 97.0, 37.0, 18.0, 1.4, 9000.0])
    spread = torch.tensor([12.0, 15.0, 2.0, 0.6, 4.0, 0.5, 3000.0])
    drift = torch.tensor([1.0, -1, -1, 0.5, 1, 1, 0.8]) * torch.linspace(0, 1, steps)[:, None]
    x = base + spread * (torch.randn(n, steps, 7, generator=gen) + 1.5 * risk[:, None, None] * drift)
    x[torch.rand(x.shape, generator=gen) < torch.tensor([0.1, 0.1, 0.1, 0.6, 0.2, 0.9, 0.95])] = float("nan")
    return x, (risk + 0.3 * torch.randn(n, generator=gen) > 0.8).float()

torch.manual_seed(2)
model = DecayGRU(7)
MODULES = [model]
gen = torch.Generator().manual_seed(14)
opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
watch(*MODULES)

for step in range(1, 81):
    x, died = ward(32, gen)
    model.moments.absorb(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logit = model(x)
    loss = F.binary_cross_entropy_with_logits(logit.float(), died, pos_weight=torch.tensor(3.0))
    opt.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 16 == 0:
        print(step, f"bce {loss.item():.3f} acc {((logit > 0) == died.bool()).float().mean().item():.2f}")
