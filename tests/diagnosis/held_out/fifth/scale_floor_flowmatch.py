"""Flow matching on 2-d toy data, sum-reduced loss."""
import math
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
MIN_SCALE = 2.0 ** 15


class VelocityField(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.freqs = nn.Parameter(torch.exp(torch.linspace(0, 3, 8)), requires_grad=False)
        self.net = nn.Sequential(nn.Linear(2 + 16, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, t):
        ang = t * self.freqs
        return self.net(torch.cat([x, ang.sin(), ang.cos()], -1))


def two_moons(n, gen):
    th = math.pi * torch.rand(n, generator=gen)
    top = torch.rand(n, generator=gen) < 0.5
    x = torch.where(top, th.cos(), 1 - th.cos())
    y = torch.where(top, th.sin(), 0.5 - th.sin())
    return torch.stack([x, y], 1) * 2 + 0.05 * torch.randn(n, 2, generator=gen)


torch.manual_seed(1234)
gen = torch.Generator().manual_seed(4321)
field = VelocityField()
MODULES = [field]
watch(*MODULES)
opt = torch.optim.Adam([p for p in field.parameters() if p.requires_grad], lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=200)

applied = 0
for it in range(60):
    x1 = two_moons(128, gen)
    x0 = torch.randn(128, 2, generator=gen)
    t = torch.rand(128, 1, generator=gen)
    xt = (1 - t) * x0 + t * x1
    with torch.autocast("cpu", dtype=torch.float16):
        v = field(xt, t)
    loss = ((v.float() - (x1 - x0)) ** 2).sum()
    opt.zero_grad()
    scaler.scale(loss).backward()  # CAUSE
    before = field.net[0].weight.detach().clone()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < MIN_SCALE:
        scaler.update(MIN_SCALE)  # CAUSE
    applied += int(not torch.equal(before, field.net[0].weight))
print("applied", applied, "of 60, loss per point", loss.item() / 128)
