# Unpaired-ish face -> sketch translation with a patch critic. One scaler for each side.
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(77)


def block(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1), nn.InstanceNorm2d(o, affine=True), nn.LeakyReLU(0.2))


G = nn.Sequential(block(3, 16), block(16, 32, 2), nn.Upsample(scale_factor=2), block(32, 16), nn.Conv2d(16, 1, 3, padding=1), nn.Tanh())
D = nn.Sequential(block(4, 16, 2), block(16, 32, 2), nn.Conv2d(32, 1, 1))
MODULES = [G, D]

g_opt = torch.optim.Adam(G.parameters(), lr=5e-4, betas=(0.5, 0.999))
d_opt = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))


def faces(n=48, size=24):
    gen = torch.Generator().manual_seed(50)
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    r = 0.4 + 0.4 * torch.rand(n, 1, 1, generator=gen)
    disc = (yy ** 2 + xx ** 2).sqrt()[None]
    rgb = torch.rand(n, 3, 1, 1, generator=gen) * (disc < r)[:, None] + 0.05 * torch.randn(n, 3, size, size, generator=gen)
    line = 1 - 2 * torch.exp(-((disc - r) / 0.08) ** 2)[:, None]
    return rgb, line


photo, sketch = faces()


def run_epoch(epoch, batch=6):
    amp = {side: torch.amp.GradScaler("cpu", growth_interval=1000) for side in ("G", "D")}  # CAUSE
    order = torch.randperm(len(photo), generator=torch.Generator().manual_seed(epoch))
    log = {"adv": 0.0, "rec": 0.0, "d": 0.0}
    for ids in order.split(batch):
        src, real = photo[ids], sketch[ids]
        with torch.autocast("cpu", dtype=torch.float16):
            fake = G(src)
            d_real = D(torch.cat([src, real], 1))
            d_fake = D(torch.cat([src, fake.detach()], 1))
            d_loss = F.softplus(-d_real.float()).mean() + F.softplus(d_fake.float()).mean()
        d_opt.zero_grad()
        amp["D"].scale(d_loss).backward()
        amp["D"].step(d_opt)
        amp["D"].update()

        D.requires_grad_(False)
        with torch.autocast("cpu", dtype=torch.float16):
            adv = F.softplus(-D(torch.cat([src, fake], 1)).float()).mean()
            rec = (fake.float() - real).abs().sum(dim=(1, 2, 3)).mean()  # CAUSE
            g_loss = adv + 10.0 * rec
        g_opt.zero_grad()
        amp["G"].scale(g_loss).backward()  # CAUSE
        amp["G"].step(g_opt)
        amp["G"].update()
        D.requires_grad_(True)
        for k, v in zip(log, (adv, rec, d_loss)):
            log[k] += v.item() * len(ids) / len(photo)
    print(epoch, {k: round(v, 3) for k, v in log.items()}, {k: s.get_scale() for k, s in amp.items()})


watch(*MODULES)
for epoch in range(8):
    run_epoch(epoch)
