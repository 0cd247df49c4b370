"""Spectral frames of speaker A are mapped to speaker B; least-squares GAN, two optimizers."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


torch.set_num_threads(1)
torch.manual_seed(21)
rng = torch.Generator().manual_seed(4)
BINS = 40
ENV_A = torch.linspace(1.0, -1.0, BINS)
ENV_B = torch.sin(torch.linspace(0, 6.0, BINS))


def frames(env, n):
    pitch = torch.rand(n, 1, generator=rng) * 3
    ripple = 0.4 * torch.cos(torch.arange(BINS) * (0.5 + pitch))
    return env + ripple + 0.1 * torch.randn(n, BINS, generator=rng)


class Converter(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(BINS, 96), nn.LeakyReLU(0.2), nn.Linear(96, BINS))

    def forward(self, x):
        return x + self.net(x)


class Judge(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(BINS, 96), nn.LeakyReLU(0.2), nn.Linear(96, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


conv, judge = Converter(), Judge()
MODULES = [conv, judge]
opt_g = torch.optim.Adam(conv.parameters(), lr=1e-3, betas=(0.5, 0.99))
opt_d = torch.optim.SGD(judge.parameters(), lr=0.05, momentum=0.5)
scaler_g = torch.amp.GradScaler("cpu", init_scale=128.0)
scaler_d = torch.amp.GradScaler("cpu", init_scale=8192.0)
amp = lambda: torch.autocast("cpu", dtype=torch.float16)


def d_step(real, src):
    opt_d.zero_grad(set_to_none=True)
    with amp():
        loss_real = F.mse_loss(judge(real).float(), torch.ones(len(real)))
    scaler_d.scale(loss_real).backward()
    with torch.no_grad(), amp():
        fake = conv(src)
    with amp():
        loss_fake = F.mse_loss(judge(fake.detach().float()).float(), torch.zeros(len(src)))
    scaler_g.scale(loss_fake).backward()  # CAUSE
    scaler_d.step(opt_d)
    scaler_d.update()
    return loss_real.item(), loss_fake.item()


def g_step(src):
    opt_g.zero_grad(set_to_none=True)
    with amp():
        fake = conv(src)
        adv = F.mse_loss(judge(fake).float(), torch.ones(len(src)))
        ident = F.l1_loss(fake.float(), src)
    scaler_g.scale(adv + 0.02 * ident).backward()
    scaler_g.step(opt_g)
    scaler_g.update()
    return adv.item()


def main():
    watch(*MODULES)
    for it in range(60):
        a, b = frames(ENV_A, 64), frames(ENV_B, 64)
        lr_, lf_ = d_step(b, a)
        adv = g_step(a)
        if it % 15 == 14:
            with torch.no_grad():
                dist = (conv(a).mean(0) - ENV_B).abs().mean().item()
            print(f"{it + 1} real {lr_:.4f} fake {lf_:.4f} adv {adv:.4f} envelope distance {dist:.4f}")


main()
