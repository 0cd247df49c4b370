"""WGAN-GP on 2-d points. The penalty's gradient is taken from the scaled output and unscaled by hand."""
import torch
import torch.nn as nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


def mlp(i, o, h=64):
    return nn.Sequential(nn.Linear(i, h), nn.Softplus(), nn.Linear(h, h), nn.Softplus(), nn.Linear(h, o))


def gradient_penalty(critic, real, fake, scaler, gen):
    a = torch.rand(real.size(0), 1, generator=gen)
    x = (a * real + (1 - a) * fake.float()).requires_grad_(True)
    with torch.autocast("cpu", dtype=torch.float16):
        score = critic(x)
    scaled = torch.autograd.grad(scaler.scale(score.float().sum()), x, create_graph=True)[0]
    grad = scaled * (1.0 / scaler.get_scale())
    with torch.autocast("cpu", dtype=torch.float16):
        return ((grad.square().sum(1) + 1e-12).sqrt() - 1).square().mean()


class Wgan:
    def __init__(self):
        self.gen_net, self.critic = mlp(4, 2), mlp(2, 1)
        self.og = torch.optim.Adam(self.gen_net.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.oc = torch.optim.Adam(self.critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
        self.scaler_g = torch.amp.GradScaler("cpu", init_scale=256.0)
        self.scaler_c = torch.amp.GradScaler("cpu", init_scale=256.0)

    def critic_step(self, real, z, gen):
        with torch.autocast("cpu", dtype=torch.float16):
            with torch.no_grad():
                fake = self.gen_net(z)
            w = self.critic(fake).float().mean() - self.critic(real).float().mean()
        loss = w + 10.0 * gradient_penalty(self.critic, real, fake, self.scaler_c, gen)
        self.oc.zero_grad()
        self.scaler_c.scale(loss).backward()
        self.scaler_c.step(self.oc)
        self.scaler_c.update()
        return -w.item()

    def generator_step(self, z):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = -self.critic(self.gen_net(z)).float().mean()
        self.og.zero_grad()
        self.scaler_g.scale(loss).backward()
        self.scaler_g.step(self.og)
        self.scaler_g.update()


torch.set_num_threads(1)
torch.manual_seed(11)
wgan = Wgan()
MODULES = [wgan.gen_net, wgan.critic]
watch(*MODULES)
gen = torch.Generator().manual_seed(3)
for it in range(40):
    for _ in range(2):
        ang = 6.2832 * torch.rand(64, generator=gen)
        real = torch.stack([ang.cos(), ang.sin()], 1) * 1.5 + 0.05 * torch.randn(64, 2, generator=gen)
        dist = wgan.critic_step(real, torch.randn(64, 4, generator=gen), gen)
    wgan.generator_step(torch.randn(64, 4, generator=gen))
    if it % 8 == 7:
        print(f"iter {it + 1} wasserstein {dist:.4f}")
