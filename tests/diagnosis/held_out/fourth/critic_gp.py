import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(83)
N_CRITIC, LAMBDA = 3, 10.0


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes[:-1], sizes[1:]):
        layers += [nn.Linear(a, b), nn.SiLU()]
    return nn.Sequential(*layers[:-1])


class Samples:
    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)

    def real(self, n=64):
        k = torch.randint(0, 8, (n,), generator=self.g).float() * torch.pi / 4
        return torch.stack([k.cos(), k.sin()], 1) + 0.03 * torch.randn(n, 2, generator=self.g)

    def noise(self, n=64):
        return torch.randn(n, 6, generator=self.g)

    def mix(self, a, b):
        u = torch.rand(len(a), 1, generator=self.g)
        return (u * a + (1 - u) * b).requires_grad_(True)


gen_net, critic = mlp(6, 48, 48, 2), mlp(2, 64, 64, 1)
MODULES = [gen_net, critic]
watch(*MODULES)
data = Samples(10)
opt_g = torch.optim.Adam(gen_net.parameters(), lr=3e-4, betas=(0.0, 0.9))
opt_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.0, 0.9))
scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=300)


def gradient_penalty(real, fake):
    x = data.mix(real, fake)
    with torch.autocast("cpu", dtype=torch.float16):
        out = critic(x).float().sum()
    grad_scaled, = torch.autograd.grad(scaler.scale(out), x, create_graph=True)
    grad = grad_scaled / scaler.get_scale()
    return (grad.float().norm(2, dim=1) - 1).square().mean()


for step in range(1, 91):
    real, z = data.real(), data.noise()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        fake = gen_net(z).float()
    with torch.autocast("cpu", dtype=torch.float16):
        wdist = critic(real).float().mean() - critic(fake).float().mean()
    loss_c = -wdist + LAMBDA * gradient_penalty(real, fake)
    opt_c.zero_grad(set_to_none=True)
    scaler.scale(loss_c).backward()
    scaler.step(opt_c)
    if step % N_CRITIC == 0:  # the generator rests in between
        for p in critic.parameters():
            p.requires_grad_(False)
        with torch.autocast("cpu", dtype=torch.float16):
            loss_g = -critic(gen_net(data.noise())).float().mean()
        opt_g.zero_grad(set_to_none=True)
        scaler.scale(loss_g).backward()
        scaler.step(opt_g)
        for p in critic.parameters():
            p.requires_grad_(True)
    scaler.update()
    if step % 15 == 0:
        print(f"{step:3d} W {wdist.item():.4f} critic {loss_c.item():.4f} g {loss_g.item():.4f}")
