"""Coordinate network (NeRF-like) on a 1-ray-per-pixel toy scene, trained in bfloat16."""
import math
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(33)


class FrequencyEncoder(nn.Module):
    def __init__(self, n_freq=8):
        super().__init__()
        self.register_buffer("bands", math.pi * 2.0 ** torch.arange(n_freq))

    def forward(self, x, dtype):
        phase = x.to(dtype)[..., None] * self.bands.to(dtype)  # CAUSE
        enc = torch.cat([phase.sin(), phase.cos()], -1)
        return enc.flatten(-2)


class RadianceField(nn.Module):
    def __init__(self, n_freq=8, width=96):
        super().__init__()
        self.encode = FrequencyEncoder(n_freq)
        self.l1 = nn.Linear(3 * 2 * n_freq, width)
        self.l2 = nn.Linear(width, width)
        self.sigma = nn.Linear(width, 1)
        self.rgb = nn.Linear(width, 3)

    def forward(self, xyz, dtype=torch.bfloat16):
        h = F.relu(self.l1(self.encode(xyz, dtype)))
        h = F.relu(self.l2(h))
        return F.softplus(self.sigma(h).float()), torch.sigmoid(self.rgb(h).float())


def render(field, origin, direction, n_samples=8, near=0.2, far=1.0):
    t = torch.linspace(near, far, n_samples)
    pts = origin[:, None] + direction[:, None] * t[None, :, None]
    sigma, rgb = field(pts)
    delta = (far - near) / n_samples
    alpha = 1 - torch.exp(-sigma.squeeze(-1) * delta * 10)
    trans = torch.cumprod(torch.cat([torch.ones(len(alpha), 1), 1 - alpha + 1e-6], 1), 1)[:, :-1]
    return ((alpha * trans)[..., None] * rgb).sum(1)


def rays(gen, n=256):
    uv = torch.rand(n, 2, generator=gen) * 2 - 1
    origin = torch.cat([uv, torch.zeros(n, 1)], 1)
    direction = torch.tensor([0.0, 0.0, 1.0]).expand(n, 3)
    # a fine woven texture
    stripes = 0.5 + 0.45 * torch.sin(uv[:, :1] * 64 * math.pi) * torch.cos(uv[:, 1:] * 32 * math.pi)
    return origin, direction, torch.cat([stripes, 1 - stripes, 0.5 * stripes], 1)


field = RadianceField()
MODULES = [field]
optimizer = torch.optim.Adam(field.parameters(), lr=3e-3)
lr_decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
gen = torch.Generator().manual_seed(71)
watch(*MODULES)
for it in range(120):
    o, d, target = rays(gen)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        colour = render(field, o, d)
    loss = F.mse_loss(colour.float(), target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    lr_decay.step()
    if (it + 1) % 20 == 0:
        print(f"iter {it + 1} mse {loss.item():.5f} psnr {-10 * math.log10(loss.item()):.2f}")
