"""WGAN-GP on calorimeter shower profiles; the generator trains on every fourth step only."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(61)
LAYERS, LATENT = 24, 8


def net(sizes):
    mods = []
    for a, b in zip(sizes[:-2], sizes[1:-1]):
        mods += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*mods, nn.Linear(sizes[-2], sizes[-1]))


def showers(n, g):
    depth = torch.arange(LAYERS) + 0.5
    a = 3 + torch.rand(n, 1, generator=g) * 2
    prof = depth ** a * torch.exp(-0.6 * depth)
    return prof / prof.sum(1, keepdim=True) * LAYERS


class WganGp:
    def __init__(self, lam=10.0, n_critic=4):
        self.gen, self.critic = net([LATENT, 64, 64, LAYERS]), net([LAYERS, 64, 64, 1])
        self.lam, self.n_critic = lam, n_critic
        self.opt_g = torch.optim.Adam(self.gen.parameters(), lr=4e-4, betas=(0.0, 0.9))
        self.opt_c = torch.optim.Adam(self.critic.parameters(), lr=4e-4, betas=(0.0, 0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=300)

    def gradient_penalty(self, real, fake, eps):
        mixed = (eps * real + (1 - eps) * fake).requires_grad_(True)
        with torch.autocast("cpu", dtype=torch.float16):
            score = self.critic(mixed).sum()
        scaled = torch.autograd.grad(self.scaler.scale(score), mixed, create_graph=True)[0]
        grad = scaled / self.scaler.get_scale()
        return ((grad.float().norm(dim=1) - 1) ** 2).mean()

    def critic_step(self, real, z, eps):
        with torch.autocast("cpu", dtype=torch.float16):
            fake = self.gen(z).float().detach()
            wass = self.critic(fake).float().mean() - self.critic(real).float().mean()
        loss = wass + self.lam * self.gradient_penalty(real, fake, eps)
        self.opt_c.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt_c)
        return wass

    def generator_step(self, z):
        self.critic.requires_grad_(False)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = -self.critic(self.gen(z)).float().mean()
        self.opt_g.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt_g)
        self.critic.requires_grad_(True)


gan = WganGp()
MODULES = [gan.gen, gan.critic]


def main(steps=100):
    watch(*MODULES)
    g = torch.Generator().manual_seed(17)
    for step in range(1, steps + 1):
        wass = gan.critic_step(showers(48, g), torch.randn(48, LATENT, generator=g), torch.rand(48, 1, generator=g))
        if step % gan.n_critic == 0:
            gan.generator_step(torch.randn(48, LATENT, generator=g))
        gan.scaler.update()
        if step % 20 == 0:
            print(f"step {step} W {-wass.item():.4f} scale {gan.scaler.get_scale():g}")


main()
