import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(29)


class Backbone(nn.Module):
    def __init__(self, d_in=10, d=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d_in, 64), nn.ReLU(), nn.Linear(64, d))
        self.cls = nn.Linear(d, 3)

    def forward(self, x):
        z = self.net(x)
        return z, self.cls(z)


def spread(z):
    mean = z.mean(0)
    return (z * z).mean(0) - mean * mean  # CAUSE


def moment_gap(src, tgt):
    """gap of the first two central moments per feature"""
    first = (src.mean(0) - tgt.mean(0)).float().pow(2).mean()
    second = (spread(src) - spread(tgt)).float().abs().mean()
    return first + second


class DomainPair:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.mu = torch.randn(3, 10, generator=self.g)
        self.shift = 0.5 * torch.randn(10, generator=self.g)

    def draw(self, n):
        y = torch.randint(0, 3, (n,), generator=self.g)
        xs = self.mu[y] + 0.5 * torch.randn(n, 10, generator=self.g)
        yt = torch.randint(0, 3, (n,), generator=self.g)
        xt = self.mu[yt] + self.shift + 0.5 * torch.randn(n, 10, generator=self.g)
        return 20.0 + xs, y, 20.0 + xt, yt


data = DomainPair(29)
net = Backbone()
MODULES = [net]
watch(*MODULES)
opt = torch.optim.SGD(net.parameters(), lr=3e-4, momentum=0.9, nesterov=True)
for step in range(1, 101):
    xs, ys, xt, yt = data.draw(64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        zs, logits = net(xs)
        zt, _ = net(xt)
        align = moment_gap(zs, zt)
    ce = F.cross_entropy(logits.float(), ys)
    loss = ce + 25.0 * align
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 10 == 0:
        with torch.no_grad():
            acc = (net(xt)[1].argmax(1) == yt).float().mean()
        print(f"{step:3d} ce {ce.item():.4f} gap {align.item():.4f} target acc {acc:.3f}")
