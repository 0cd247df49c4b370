"""Two-dimensional GAN: the critic steps on every batch, the generator on the sum of several batches."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


def mlp(*sizes, slope=0.2):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.LeakyReLU(slope)]
    return nn.Sequential(*layers[:-1])


class Mixture:
    def __init__(self, modes=8, radius=2.0, seed=31):
        self.generator = torch.Generator().manual_seed(seed)
        angle = torch.arange(modes) * (2 * torch.pi / modes)
        self.centres = radius * torch.stack([angle.cos(), angle.sin()], 1)

    def real(self, n):
        which = torch.randint(0, len(self.centres), (n,), generator=self.generator)
        return self.centres[which] + 0.05 * torch.randn(n, 2, generator=self.generator)

    def latent(self, n, dim=8):
        return torch.randn(n, dim, generator=self.generator)


class Config:
    steps = 96
    batch = 64
    generator_every = 4
    lr_g, lr_d = 1e-2, 2e-3
    growth_interval = 10


def requires_grad(module, flag):
    for p in module.parameters():
        p.requires_grad_(flag)


def run(cfg):
    torch.manual_seed(6)
    G, D = mlp(8, 64, 64, 2), mlp(2, 64, 64, 1)
    watch(G, D)
    opt_g = torch.optim.SGD(G.parameters(), lr=cfg.lr_g)
    opt_d = torch.optim.Adam(D.parameters(), lr=cfg.lr_d, betas=(0.5, 0.99))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 6, growth_interval=cfg.growth_interval)
    data = Mixture()
    history = []
    opt_g.zero_grad(set_to_none=True)

    for step in range(cfg.steps):
        real, z = data.real(cfg.batch), data.latent(cfg.batch)

        requires_grad(D, True)
        opt_d.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            fake = G(z)
            d_loss = F.softplus(-D(real)).float().mean() + F.softplus(D(fake.detach())).float().mean()
        scaler.scale(d_loss).backward()
        scaler.step(opt_d)

        requires_grad(D, False)
        with torch.autocast("cpu", dtype=torch.float16):
            g_loss = F.softplus(-D(fake)).float().mean() / cfg.generator_every
        scaler.scale(g_loss).backward()
        if (step + 1) % cfg.generator_every == 0:
            scaler.unscale_(opt_g)
            norm = nn.utils.clip_grad_norm_(G.parameters(), float("inf"))
            history.append(norm.item())
            scaler.step(opt_g)
        scaler.update()  # CAUSE
        if (step + 1) % cfg.generator_every == 0:
            opt_g.zero_grad(set_to_none=True)

        if step % 8 == 7:
            print(f"step {step} d {d_loss.item():.3f} g {cfg.generator_every * g_loss.item():.3f} "
                  f"norm {history[-1]:.4f} scale {scaler.get_scale():g}")
    return history


if __name__ == "__main__":
    run(Config())
