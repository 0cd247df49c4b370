"""Sea level at one tide gauge from the hour of the year: harmonic features and a small head."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(42)
AMP_DTYPE = torch.bfloat16

# periods of the constituents M2, S2, N2, K1, O1, Mf in hours
PERIODS = torch.tensor([12.4206, 12.0, 12.6583, 23.9345, 25.8193, 327.86])


class HarmonicEncoding(nn.Module):
    def __init__(self, periods, dtype):
        super().__init__()
        self.register_buffer("omega", (2 * torch.pi / periods).to(dtype), persistent=False)  # CAUSE

    def forward(self, hours):
        phase = hours.to(self.omega.dtype).unsqueeze(-1) * self.omega  # CAUSE
        return torch.cat([phase.sin(), phase.cos()], dim=-1)


class TideNet(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.encode = HarmonicEncoding(PERIODS, dtype)
        self.wind = nn.Linear(2, 8)
        self.head = nn.Sequential(nn.Linear(2 * len(PERIODS) + 8, 64), nn.SiLU(), nn.Linear(64, 1))

    def forward(self, hours, wind):
        feats = torch.cat([self.encode(hours), self.wind(wind)], dim=-1)
        return self.head(feats).squeeze(-1)


def gauge_records(n, g):
    hours = torch.rand(n, generator=g) * 8760.0
    amp = torch.tensor([1.10, 0.42, 0.21, 0.15, 0.10, 0.05])
    lag = torch.tensor([0.3, 1.1, 2.0, 0.7, 4.1, 0.2])
    wind = torch.randn(n, 2, generator=g)
    level = (amp * torch.cos(2 * torch.pi * hours.double().unsqueeze(-1) / PERIODS.double() - lag)).sum(-1)
    return hours, wind, (level + 0.06 * wind[:, 0]).float()


def evaluate(net, batch):
    net.eval()
    with torch.no_grad(), torch.autocast("cpu", dtype=AMP_DTYPE):
        hours, wind, level = batch
        rmse = (net(hours, wind).float() - level).square().mean().sqrt()
    net.train()
    return rmse.item()


g = torch.Generator().manual_seed(2020)
net = TideNet(AMP_DTYPE)
MODULES = [net]
watch(*MODULES)
opt = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=1e-4)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=120, eta_min=5e-4)
holdout = gauge_records(512, g)
for it in range(120):
    hours, wind, level = gauge_records(128, g)
    with torch.autocast("cpu", dtype=AMP_DTYPE):
        pred = net(hours, wind)
    loss = nn.functional.mse_loss(pred.float(), level)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    opt.step()
    sched.step()
    if it % 30 == 29:
        print(f"it {it + 1} mse {loss.item():.4f} holdout rmse {evaluate(net, holdout):.4f} m")
