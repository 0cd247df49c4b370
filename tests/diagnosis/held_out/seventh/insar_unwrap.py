"""Atmospheric phase screen removal for interferograms: predict a complex correction per pixel, fit the wrapped phase."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(7)
g = torch.Generator().manual_seed(99)


class ScreenNet(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.enc = nn.Sequential(
            nn.Conv2d(3, ch, 3, padding=1), nn.GroupNorm(4, ch), nn.SiLU(),
            nn.Conv2d(ch, ch, 3, padding=1), nn.GroupNorm(4, ch), nn.SiLU(),
        )
        self.to_complex = nn.Conv2d(ch, 2, 1)

    def forward(self, dem, ifg):
        coh = torch.log10(ifg.square().sum(1, keepdim=True) + 1e-12) / 8.0
        feats = self.enc(torch.cat([dem, coh], 1))
        corr = self.to_complex(feats)
        a, b = ifg.to(corr.dtype).unbind(1)
        c, d = corr.unbind(1)
        c = c + 1.0
        return a * c - b * d, a * d + b * c


def make_scene(n, size=16):
    dem = torch.randn(n, 2, size, size, generator=g)
    dem = F.avg_pool2d(dem, 3, stride=1, padding=1)
    screen = 1.2 * dem[:, 0] - 0.8 * dem[:, 1]
    truth = torch.rand(n, 1, 1, generator=g) * 2 - 1
    amp = 5e-5 * (0.4 + torch.rand(n, size, size, generator=g))  # calibrated sigma0 amplitude
    ph = truth + screen
    ifg = torch.stack([amp * torch.cos(ph), amp * torch.sin(ph)], 1)
    return dem, ifg, truth.expand(n, size, size)


def wrapped_phase_loss(re, im, target):
    phase = torch.atan2(im, re)  # CAUSE
    return (1.0 - torch.cos(phase.float() - target)).mean()


net = ScreenNet()
MODULES = [net]
opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.0)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 7, growth_interval=500)
val = make_scene(16)


@torch.no_grad()
def residual():
    net.eval()
    with torch.autocast("cpu", dtype=torch.float16):
        re, im = net(val[0], val[1])
    net.train()
    return wrapped_phase_loss(re.float(), im.float(), val[2]).item()


watch(*MODULES)
for it in range(70):
    dem, ifg, target = make_scene(8)
    with torch.autocast("cpu", dtype=torch.float16):
        re, im = net(dem, ifg)
        loss = wrapped_phase_loss(re, im, target)
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 23 == 0:
        print(f"it {it:3d} loss {loss.item():.4f} residual {residual():.4f}")
print("final residual", round(residual(), 4))
