import torch
from torch import nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(77)
# cantilever under periodic load, SI units: deflection of a few millimetres
LENGTH, U0, KAPPA = 2.0, 2e-3, 0.08


class Fourier(nn.Module):
    def __init__(self, n, scale, gen):
        super().__init__()
        self.register_buffer("B", scale * torch.randn(2, n, generator=gen))

    def forward(self, z):
        p = z @ self.B
        return torch.cat([p.sin(), p.cos()], -1)


class Deflection(nn.Module):
    def __init__(self, gen, width=64):
        super().__init__()
        self.enc = Fourier(16, 1.0, gen)
        self.net = nn.Sequential(nn.Linear(32, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, x, t):
        raw = self.net(self.enc(torch.stack([x / LENGTH, t], -1))).squeeze(-1)
        return U0 * (x / LENGTH) ** 2 * raw  # CAUSE


def exact(x, t):
    s = x / LENGTH
    return U0 * s ** 2 * (1.5 - 0.5 * s) * torch.sin(3 * t) * torch.exp(-KAPPA * t)


class Trainer:
    def __init__(self, model, gen):
        self.model, self.gen = model, gen
        self.opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-12)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.995)
        self.log = []

    def collocation(self, n=1024):
        return LENGTH * torch.rand(n, generator=self.gen), 4 * torch.rand(n, generator=self.gen)

    def loss(self):
        x, t = self.collocation()
        h = 0.05
        with torch.autocast("cpu", dtype=torch.float16):
            u = self.model(x, t)
            um, up = self.model(x, t - h), self.model(x, t + h)
        data = (u - exact(x, t)).square().mean()
        accel = (up - 2 * u + um) / h ** 2
        ref = (exact(x, t + h) - 2 * exact(x, t) + exact(x, t - h)) / h ** 2
        return data + 1e-6 * (accel - ref).square().mean(), data

    def step(self):
        total, data = self.loss()
        self.opt.zero_grad(set_to_none=True)
        total.backward()  # CAUSE
        self.opt.step()
        self.sched.step()
        self.log.append(data.item() ** 0.5)


gen = torch.Generator().manual_seed(770)
model = Deflection(gen)
MODULES = [model]
watch(*MODULES)
trainer = Trainer(model, gen)
for it in range(80):
    trainer.step()
    if it % 10 == 9:
        print(f"it {it + 1}: rms error {1e3 * trainer.log[-1]:.5f} mm")
