"""Traffic-speed forecasting on a road graph; broken loop detectors report NaN."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(28)
NODES, PAST, AHEAD = 20, 12, 4


class DiffusionConv(nn.Module):
    def __init__(self, cin, cout, hops=2):
        super().__init__()
        self.hops = hops
        self.lin = nn.Linear(cin * (hops + 1), cout)

    def forward(self, x, support):
        feats = [x]
        for _ in range(self.hops):
            feats.append(torch.einsum("ij,bjc->bic", support, feats[-1]))
        return self.lin(torch.cat(feats, -1))


class Forecaster(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.a, self.b = DiffusionConv(2 * PAST, width), DiffusionConv(width, width)
        self.head = nn.Linear(width, AHEAD)

    def forward(self, x, support):
        seen = ~torch.isnan(x)
        x = torch.cat([torch.nan_to_num(x), seen.to(x.dtype)], -1)
        h = F.silu(self.a(x, support))
        return self.head(h + F.silu(self.b(h, support)))


class DetectorFeed:
    def __init__(self, seed=19):
        self.g = torch.Generator().manual_seed(seed)
        xy = torch.rand(NODES, 2, generator=self.g)
        w = torch.exp(-torch.cdist(xy, xy).square() / 0.05)
        self.support = w / w.sum(1, keepdim=True)

    def batch(self, n=24):
        phase = torch.rand(n, 1, 1, generator=self.g) * 6.28
        lag = torch.linspace(0, 2, NODES).view(1, -1, 1)
        t = torch.arange(PAST + AHEAD).view(1, 1, -1) * 0.4
        speed = torch.sin(t + phase + lag) + 0.1 * torch.randn(n, NODES, PAST + AHEAD, generator=self.g)
        broken = torch.rand(n, NODES, 1, generator=self.g) < 0.15
        dropout = torch.rand(speed.shape, generator=self.g) < 0.05
        speed = speed.masked_fill(broken | dropout, float("nan"))
        return speed[..., :PAST], speed[..., PAST:]


def masked_mae(pred, target):
    valid = torch.isfinite(target)
    err = (pred.float() - torch.where(valid, target, torch.zeros_like(target))).abs()
    return (err * valid).sum() / valid.sum().clamp(min=1)


def main(steps=80):
    feed, net = DetectorFeed(), Forecaster()
    watch(net)
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(steps):
        past, future = feed.batch()
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = masked_mae(net(past, feed.support), future)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if step % 10 == 0:
            share = torch.isnan(past).float().mean().item()
            print(f"step {step} mae {loss.item():.4f} missing {share:.0%}")
    return net


MODULES = [main()]
