import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(61)

Z, RES = 12, 12
R1_EVERY, R1_START, R1_GAMMA = 6, 30, 0.5

class G(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(Z, 32 * 9)
        self.c1 = nn.Conv2d(32, 24, 3, padding=1)
        self.c2 = nn.Conv2d(24, 1, 3, padding=1)

    def forward(self, z):
        h = F.leaky_relu(self.fc(z).view(-1, 32, 3, 3), 0.2)
        h = F.leaky_relu(self.c1(F.interpolate(h, scale_factor=2.0)), 0.2)
        return torch.tanh(self.c2(F.interpolate(h, scale_factor=2.0)))

class D(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 24, 4, 2, 1)
        self.c2 = nn.Conv2d(24, 32, 4, 2, 1)
        self.fc = nn.Linear(32 * 9, 1)

    def forward(self, x):
        h = F.softplus(self.c2(F.softplus(self.c1(x))))
        return self.fc(h.flatten(1)).squeeze(1)

class GANTrainer:
    def __init__(self, g, d):
        self.g, self.d = g, d
        self.opt_g = torch.optim.Adam(g.parameters(), lr=1e-3, betas=(0.0, 0.99))
        self.opt_d = torch.optim.Adam(d.parameters(), lr=1e-3, betas=(0.0, 0.99))
        self.scaler_g = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
        self.scaler_d = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
        self.rng = torch.Generator().manual_seed(8)

    def real(self, n=16):
        yy, xx = torch.meshgrid(torch.arange(RES), torch.arange(RES), indexing="ij")
        cx, cy = torch.rand(2, n, 1, 1, generator=self.rng) * 6 + 3
        return (2 * torch.exp(-((xx - cx) ** 2 + (yy - cy) ** 2) / 6.0) - 1).unsqueeze(1)

    def latent(self, n=16):
        return torch.randn(n, Z, generator=self.rng)

    def d_step(self, it):
        x = self.real()
        lazy = it >= R1_START and it % R1_EVERY == 0
        x.requires_grad_(lazy)
        with torch.autocast("cpu", dtype=torch.float16):
            fake = self.g(self.latent()).detach()
            d_real, d_fake = self.d(x), self.d(fake)
            loss = F.softplus(d_fake.float()).mean() + F.softplus(-d_real.float()).mean()
        if lazy:
            grad, = torch.autograd.grad(self.scaler_d.scale(d_real.float().sum()), x, create_graph=True)  # CAUSE
            penalty = grad.float().square().sum((1, 2, 3)).mean()  # CAUSE
            loss = loss + 0.5 * R1_GAMMA * R1_EVERY * penalty
        self.opt_d.zero_grad(set_to_none=True)
        self.scaler_d.scale(loss).backward()
        self.scaler_d.step(self.opt_d)
        self.scaler_d.update()
        return loss.item()

    def g_step(self):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.softplus(-self.d(self.g(self.latent())).float()).mean()
        self.opt_g.zero_grad(set_to_none=True)
        self.scaler_g.scale(loss).backward()
        self.scaler_g.step(self.opt_g)
        self.scaler_g.update()
        return loss.item()

gen_net, disc_net = G(), D()
MODULES = [gen_net, disc_net]
watch(*MODULES)
trainer = GANTrainer(gen_net, disc_net)
for it in range(1, 81):
    ld, lg = trainer.d_step(it), trainer.g_step()
    if it % 6 == 0:
        print(f"{it:3d} D {ld:.3f} G {lg:.3f} scale {trainer.scaler_d.get_scale():g}")
