import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(61)
gen = torch.Generator().manual_seed(610)
G = nn.Sequential(nn.Linear(6, 48), nn.SiLU(), nn.Linear(48, 24))
D = nn.Sequential(nn.Linear(24, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 1))
MODULES = [G, D]
watch(*MODULES)
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_d = torch.optim.Adam(D.parameters(), lr=1e-3, betas=(0.0, 0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=30)


def real_batch(n=32):
    phase = 6.28 * torch.rand(n, 1, generator=gen)
    return torch.sin(torch.linspace(0, 6.28, 24) + phase)


def penalty(real, fake):
    alpha = torch.rand(len(real), 1, generator=gen)
    mix = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.float16):
        score = D(mix).float().sum()
    grads = torch.autograd.grad(scaler.scale(score), mix, create_graph=True)[0]
    grads = grads * (1.0 / scaler.get_scale())
    return ((grads.square().sum(1) + 1e-12).sqrt() - 1).square().mean()


for it in range(60):
    real = real_batch()
    with torch.autocast("cpu", dtype=torch.float16):
        fake = G(torch.randn(32, 6, generator=gen)).detach().float()
        adv = D(fake).float().mean() - D(real).float().mean()
    loss_d = adv + 10.0 * penalty(real, fake)
    opt_d.zero_grad()
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)
    if it % 3 == 2:
        opt_g.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss_g = -D(G(torch.randn(32, 6, generator=gen))).float().mean()
        scaler.scale(loss_g).backward()
        scaler.step(opt_g)
    scaler.update()
print("critic", loss_d.item(), "scale", scaler.get_scale())
