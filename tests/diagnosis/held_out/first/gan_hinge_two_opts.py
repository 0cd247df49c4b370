import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(1234)
torch.set_num_threads(1)

Z, BATCH = 16, 24


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(Z, 32 * 9)
        self.up = nn.ConvTranspose2d(32, 16, 4, 2, 1)
        self.out = nn.ConvTranspose2d(16, 1, 4, 2, 1)

    def forward(self, z):
        h = F.relu(self.fc(z)).view(-1, 32, 3, 3)
        return torch.tanh(self.out(F.relu(self.up(h))))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        sn = nn.utils.parametrizations.spectral_norm
        self.a = sn(nn.Conv2d(1, 16, 4, 2, 1))
        self.b = sn(nn.Conv2d(16, 32, 4, 2, 1))
        self.fc = nn.Linear(32 * 9, 1)

    def forward(self, x):
        h = F.leaky_relu(self.b(F.leaky_relu(self.a(x), 0.2)), 0.2)
        return self.fc(h.flatten(1)).squeeze(1)


def reals(gen):
    yy, xx = torch.meshgrid(torch.linspace(-1, 1, 12), torch.linspace(-1, 1, 12), indexing="ij")
    c = torch.rand(BATCH, 2, 1, 1, generator=gen) - 0.5
    return 2 * torch.exp(-6 * ((yy - c[:, :1]) ** 2 + (xx - c[:, 1:]) ** 2)) - 1


G, D = Generator(), Critic()
MODULES = [G, D]
opt_g = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.0, 0.99))
opt_d = torch.optim.Adam(D.parameters(), lr=4e-4, betas=(0.0, 0.99))
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 13, growth_interval=20)
gen = torch.Generator().manual_seed(6)
watch(*MODULES)

for it in range(1, 61):
    x, z = reals(gen), torch.randn(BATCH, Z, generator=gen)
    with torch.autocast("cpu", dtype=torch.float16):
        fake = G(z)
        loss_d = F.relu(1 - D(x).float()).mean() + F.relu(1 + D(fake.detach()).float()).mean()
    opt_d.zero_grad(set_to_none=True)
    scaler.scale(loss_d).backward()
    scaler.step(opt_d)
    if it % 2 == 0:  # two critic steps for one generator step
        with torch.autocast("cpu", dtype=torch.float16):
            loss_g = -D(fake).float().mean()
        opt_g.zero_grad(set_to_none=True)
        scaler.scale(loss_g).backward()
        scaler.step(opt_g)
    scaler.update()
    if it % 10 == 0:
        print(f"{it} D {loss_d.item():.4f} G {loss_g.item():.4f} scale {scaler.get_scale():g}")
