"""Multi-scale discriminator with a gradient penalty whose values are huge in the first steps."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(46)


class Generator(nn.Module):
    def __init__(self, z=16, ch=16):
        super().__init__()
        self.ch = ch
        self.fc = nn.Linear(z, ch * 16)
        self.up1, self.up2 = nn.Conv2d(ch, ch, 3, padding=1), nn.Conv2d(ch, ch, 3, padding=1)
        self.to_rgb = nn.ModuleList([nn.Conv2d(ch, 1, 1), nn.Conv2d(ch, 1, 1)])

    def forward(self, z):
        x = F.relu(self.fc(z).view(-1, self.ch, 4, 4))
        x = F.relu(self.up1(F.interpolate(x, scale_factor=2)))
        small = torch.tanh(self.to_rgb[0](x))
        x = F.relu(self.up2(F.interpolate(x, scale_factor=2)))
        return torch.tanh(self.to_rgb[1](x)), small


class Discriminator(nn.Module):
    def __init__(self, ch=16, gain=20.0):
        super().__init__()
        self.from_rgb = nn.ModuleList([nn.Conv2d(1, ch, 3, padding=1), nn.Conv2d(1, ch, 3, padding=1)])
        self.down = nn.Conv2d(ch, ch, 4, stride=2, padding=1)
        self.body, self.logit = nn.Conv2d(ch, ch, 4, stride=2, padding=1), nn.ModuleList(nn.Linear(ch * 16, 1) for _ in range(2))
        with torch.no_grad():
            for p in (self.from_rgb[0].weight, self.from_rgb[1].weight, self.down.weight, self.body.weight):
                p.mul_(gain)

    def forward(self, image, small):
        h = F.leaky_relu(self.down(F.leaky_relu(self.from_rgb[0](image), 0.2)), 0.2)
        outs = []
        for feature, head in ((h, self.logit[0]), (F.leaky_relu(self.from_rgb[1](small), 0.2), self.logit[1])):
            outs.append(head(F.leaky_relu(self.body(feature), 0.2).flatten(1)))
        return torch.cat(outs, 1)


def gradient_penalty(discriminator, image, small):
    with torch.autocast("cpu", enabled=False):
        image, small = image.detach().float().requires_grad_(), small.detach().float().requires_grad_()
        out = discriminator(image, small)
        grads = torch.autograd.grad(out.sum(), (image, small), create_graph=True)
        return sum((g.flatten(1).norm(2, dim=1) - 1).pow(2).mean() for g in grads)


def reals(gen, n=8):
    c = 5 + 6 * torch.rand(n, 2, 1, 1, generator=gen)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    image = (2 * torch.exp(-((yy - c[:, 0]) ** 2 + (xx - c[:, 1]) ** 2) / 9) - 1).unsqueeze(1)
    return image, F.avg_pool2d(image, 2)


G, D = Generator(), Discriminator()
watch(G, D)
g_opt = torch.optim.Adam(G.parameters(), lr=2e-3, betas=(0.5, 0.9))
d_opt = torch.optim.Adam(D.parameters(), lr=1.5e-2, betas=(0.5, 0.9))
g_scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8, growth_interval=200)
d_scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 8, growth_interval=200)
gen = torch.Generator().manual_seed(4)

for step in range(48):
    image, small = reals(gen)
    with torch.autocast("cpu", dtype=torch.float16):
        with torch.no_grad():
            fake, fake_small = G(torch.randn(len(image), 16, generator=gen))
        real_logits, fake_logits = D(image, small), D(fake, fake_small)
        divergence = (F.relu(1 - real_logits.float()) + F.relu(1 + fake_logits.float())).mean()
    gp = gradient_penalty(D, image, small)
    d_opt.zero_grad()
    d_scaler.scale(divergence + 1e-2 * gp).backward()
    d_scaler.step(d_opt)
    d_scaler.update()

    with torch.autocast("cpu", dtype=torch.float16):
        g_loss = -D(*G(torch.randn(len(image), 16, generator=gen))).float().mean()
    g_opt.zero_grad()
    g_scaler.scale(g_loss).backward()
    g_scaler.step(g_opt)
    g_scaler.update()
    if step < 3 or step % 6 == 0:
        print(f"G: {g_loss.item():.2f} | D: {divergence.item():.2f} | GP: {gp.item():.1f} | scales "
              f"{g_scaler.get_scale():.0f} {d_scaler.get_scale():.0f}")
