import math
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(101)
torch.set_num_threads(1)


class CosineSchedule:
    def __init__(self, steps=128, s=0.008):
        f = torch.cos((torch.linspace(0, 1, steps + 1) + s) / (1 + s) * math.pi / 2) ** 2
        betas = (1 - f[1:] / f[:-1]).clamp(max=0.9999)
        self.num_steps = steps
        self.alphas_cumprod = torch.cumprod(1 - betas, 0)

    def coefficients(self, t, like):
        abar = self.alphas_cumprod.to(dtype=like.dtype)[t]  # CAUSE
        return abar.view(-1, *[1] * (like.dim() - 1))

    def add_noise(self, x0, eps, t):
        a = self.coefficients(t, x0)
        return a.sqrt() * x0 + (1 - a).sqrt() * eps

    def min_snr_weight(self, x0, t, gamma=5.0):
        a = self.coefficients(t, x0).flatten()
        snr = a / (1 - a)
        return snr.clamp(max=gamma) / snr


class Denoiser(nn.Module):
    def __init__(self, ch=4, width=32, tdim=32):
        super().__init__()
        self.tdim = tdim
        self.temb = nn.Sequential(nn.Linear(tdim, width), nn.SiLU(), nn.Linear(width, width))
        self.inp = nn.Conv2d(ch, width, 3, padding=1)
        self.mid = nn.Conv2d(width, width, 3, padding=1)
        self.n1, self.n2 = nn.GroupNorm(4, width), nn.GroupNorm(4, width)
        self.out = nn.Conv2d(width, ch, 3, padding=1)

    def forward(self, x, t):
        freq = torch.exp(-math.log(1000.0) * torch.arange(self.tdim // 2) / (self.tdim // 2))
        ang = t[:, None].float() * freq
        e = self.temb(torch.cat([ang.sin(), ang.cos()], -1))[:, :, None, None]
        h = self.inp(x)
        h = h + self.mid(F.silu(self.n1(h) + e))
        return self.out(F.silu(self.n2(h)))


def latents(gen, n=16):
    """pre-computed VAE latents are stored in half on disk"""
    base = torch.randn(n, 4, 1, 1, generator=gen)
    ramp = torch.linspace(-1, 1, 8).view(1, 1, 8, 1)
    return (base * ramp + 0.1 * torch.randn(n, 4, 8, 8, generator=gen)).to(torch.float16)


unet, ema_unet = Denoiser(), Denoiser()
ema_unet.load_state_dict(unet.state_dict())
ema_unet.requires_grad_(False)
MODULES = [unet, ema_unet]
noise_scheduler = CosineSchedule()
optimizer = torch.optim.AdamW(unet.parameters(), lr=2e-3, weight_decay=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2 ** 11)
watch(*MODULES)
gen = torch.Generator().manual_seed(55)

global_step = 0
while global_step < 80:
    x0 = latents(gen)
    eps = torch.randn(x0.shape, generator=gen).to(x0.dtype)
    t = torch.randint(0, noise_scheduler.num_steps, (x0.size(0),), generator=gen)
    # the first phase keeps to the easier half of the chain
    if global_step < 15:
        t = t // 2
    noisy = noise_scheduler.add_noise(x0, eps, t)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = unet(noisy, t)
    mse = F.mse_loss(pred.float(), eps.float(), reduction="none").mean(dim=(1, 2, 3))
    loss = (noise_scheduler.min_snr_weight(x0, t) * mse).mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for pe, p in zip(ema_unet.parameters(), unet.parameters()):
            pe.lerp_(p, 0.05)
    global_step += 1
    if global_step % 10 == 0:
        print({"step": global_step, "loss": round(loss.item(), 4), "scale": scaler.get_scale()})
