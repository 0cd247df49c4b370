"""Radiance field of a small scene along rays; the loss is multiplied before the backward pass and never divided again."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(141)


class RadianceField(nn.Module):
    def __init__(self, d=48, freqs=4):
        super().__init__()
        self.freqs = freqs
        self.base = nn.Sequential(nn.Linear(6 * freqs, d), nn.ReLU(), nn.Linear(d, d), nn.ReLU())
        self.sigma, self.rgb = nn.Linear(d, 1), nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, 3))

    def forward(self, x):
        angles = (x.unsqueeze(-1) * 2.0 ** torch.arange(self.freqs)).flatten(-2)
        h = self.base(torch.cat([angles.sin(), angles.cos()], -1))
        return F.softplus(self.sigma(h).float().squeeze(-1) - 1), torch.sigmoid(self.rgb(h).float())


def render(sigmas, rgbs, t):
    delta = t[:, 1:] - t[:, :-1]
    alphas = 1 - torch.exp(-sigmas[:, :-1] * delta)
    trans = torch.cumprod(torch.cat([torch.ones_like(alphas[:, :1]), 1 - alphas[:, :-1] + 1e-7], 1), 1)
    weights = alphas * trans
    return (weights.unsqueeze(-1) * rgbs[:, :-1]).sum(1) + (1 - weights.sum(1, keepdim=True))


def true_scene(x):
    """A red and a blue ball."""
    red, blue = (x - torch.tensor([0.3, 0.0, 0.0])).norm(dim=-1) < 0.35, (x + torch.tensor([0.35, 0.1, 0.0])).norm(dim=-1) < 0.3
    sigma = 12.0 * (red | blue).float()
    return sigma, torch.stack([red.float(), torch.full_like(sigma, 0.15), blue.float()], -1)


def rays(gen, n=96, samples=20):
    origin = F.normalize(torch.randn(n, 3, generator=gen), dim=-1) * 1.5
    aim = 0.4 * torch.randn(n, 3, generator=gen)
    direction = F.normalize(aim - origin, dim=-1)
    t = torch.linspace(0.5, 2.5, samples).expand(n, -1)
    return origin[:, None] + direction[:, None] * t.unsqueeze(-1), t


max_steps = 90
gen = torch.Generator().manual_seed(142)
radiance_field = RadianceField()
watch(radiance_field)
grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
optimizer = torch.optim.Adam(radiance_field.parameters(), lr=3e-3, eps=1e-15)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[max_steps // 2, max_steps * 3 // 4], gamma=0.33)

for step in range(max_steps):
    radiance_field.train()
    positions, t = rays(gen)
    with torch.no_grad():
        pixels = render(*true_scene(positions), t)
    with torch.autocast("cpu", dtype=torch.float16):
        sigmas, rgbs = radiance_field(positions)
    rgb = render(sigmas, rgbs, t)
    loss = F.smooth_l1_loss(rgb, pixels)
    optimizer.zero_grad()
    # do not unscale it because we are using Adam.
    grad_scaler.scale(loss).backward()
    optimizer.step()
    scheduler.step()
    if step % 15 == 0 or step == max_steps - 1:
        mse = F.mse_loss(rgb, pixels)
        print(f"step={step} loss={loss.item():.5f} psnr={-10 * torch.log10(mse).item():.2f}")
