import torch
from torch import nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(301)
gen = torch.Generator().manual_seed(302)
Z, D, LAMBDA, N_CRITIC = 8, 6, 10.0, 3


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(Z, 48), nn.ELU(), nn.Linear(48, 48), nn.ELU(), nn.Linear(48, D))

    def forward(self, z):
        return self.net(z)


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 48), nn.Softplus(), nn.Linear(48, 48), nn.Softplus(), nn.Linear(48, 1))

    def forward(self, x):
        return self.net(x).squeeze(-1)


mixing = torch.randn(D, D, generator=gen) / D ** 0.5


def real_rows(n):
    base = torch.randn(n, D, generator=gen)
    base[:, 0] = (base[:, 0] > 0).float() * 2 - 1
    return base @ mixing


def gradient_penalty(critic, real, fake, scaler):
    alpha = torch.rand(len(real), 1, generator=gen)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.float16):
        score = critic(mixed)
    scaled = torch.autograd.grad(scaler.scale(score.float().sum()), mixed, create_graph=True)[0]
    grad = scaled * (1.0 / scaler.get_scale())
    with torch.autocast("cpu", enabled=False):
        norm = (grad.float().pow(2).sum(1) + 1e-12).sqrt()
        return LAMBDA * (norm - 1).pow(2).mean()


G, C = Generator(), Critic()
MODULES = [G, C]
watch(*MODULES)
opt_g = torch.optim.Adam(G.parameters(), lr=1e-3, betas=(0.0, 0.9))
opt_c = torch.optim.Adam(C.parameters(), lr=2e-3, betas=(0.0, 0.9))
scaler_c = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=25)
scaler_g = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=25)

for it in range(1, 31):
    for _ in range(N_CRITIC):
        real = real_rows(64)
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                fake = G(torch.randn(64, Z, generator=gen))
            wdist = C(real).float().mean() - C(fake).float().mean()
        gp = gradient_penalty(C, real, fake.float(), scaler_c)
        opt_c.zero_grad()
        scaler_c.scale(gp - wdist).backward()
        scaler_c.step(opt_c)
        scaler_c.update()
    with torch.autocast("cpu", dtype=torch.float16):
        loss_g = -C(G(torch.randn(64, Z, generator=gen))).float().mean()
    opt_g.zero_grad()
    scaler_g.scale(loss_g).backward()
    scaler_g.step(opt_g)
    scaler_g.update()
    if it % 5 == 0:
        print(f"{it:3d} wdist {wdist.item():+.4f} gp {gp.item():.4f} g {loss_g.item():+.4f} scales {scaler_c.get_scale():g} {scaler_g.get_scale():g}")
