"""Diffusion autoencoder: samples are drawn from averaged weights, which are long behind the trained ones."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(33)


class SemanticEncoder(nn.Module):
    def __init__(self, z=16):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.SiLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.SiLU(), nn.Flatten(),
                                 nn.Linear(24 * 9, z))

    def forward(self, x):
        return self.net(x)


class ConditionalDenoiser(nn.Module):
    def __init__(self, c=16, z=16, steps=40):
        super().__init__()
        self.time, self.style = nn.Embedding(steps, c), nn.Linear(z, 2 * c)
        self.inp, self.mid, self.out = nn.Conv2d(1, c, 3, 1, 1), nn.Conv2d(c, c, 3, 1, 1), nn.Conv2d(c, 1, 3, 1, 1)
        self.norm = nn.GroupNorm(4, c)

    def forward(self, x, t, z):
        h = self.inp(x) + self.time(t)[:, :, None, None]
        scale, shift = self.style(z)[:, :, None, None].chunk(2, 1)
        h = h + self.mid(F.silu(self.norm(h) * (1 + scale) + shift))
        return self.out(F.silu(h))


class DiffAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.denoiser = SemanticEncoder(), ConditionalDenoiser()

    def forward(self, x0, noisy, t):
        return self.denoiser(noisy, t, self.encoder(x0))


def ema(source, target, decay):
    """float32 in both, from the start with the full decay as in the paper's code."""
    source_dict, target_dict = source.state_dict(), target.state_dict()
    for key in source_dict:
        target_dict[key].data.copy_(target_dict[key].data * decay + source_dict[key].data * (1 - decay))


class LitModel:
    def __init__(self, ema_decay=0.999, lr=2e-3):
        self.model = DiffAE()
        self.ema_model = copy.deepcopy(self.model).requires_grad_(False).eval()
        self.ema_decay = ema_decay
        self.opt = torch.optim.Adam(self.model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
        self.alphas = torch.cumprod(1 - torch.linspace(1e-3, 0.2, 40), 0)

    def loss(self, net, x0, gen):
        t = torch.randint(0, 40, (len(x0),), generator=gen)
        noise = torch.randn(x0.shape, generator=gen)
        a = self.alphas[t].view(-1, 1, 1, 1)
        with torch.autocast("cpu", dtype=torch.float16):
            return F.mse_loss(net(x0, a.sqrt() * x0 + (1 - a).sqrt() * noise, t).float(), noise)

    def training_step(self, x0, gen):
        loss = self.loss(self.model, x0, gen)
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.opt)
        self.scaler.update()
        ema(self.model, self.ema_model, self.ema_decay)
        return loss.item()

    @torch.no_grad()
    def validate(self, x0):
        return tuple(self.loss(net, x0, torch.Generator().manual_seed(5)).item() for net in (self.model, self.ema_model))


def crosses(gen, n=8, size=12):
    img = -torch.ones(n, 1, size, size)
    for i in range(n):
        r, c = torch.randint(2, size - 2, (2,), generator=gen).tolist()
        img[i, 0, r - 1:r + 1], img[i, 0, :, c - 1:c + 1] = 1, 1
    return img


lit = LitModel()
watch(lit.model)
gen = torch.Generator().manual_seed(8)
held_out = crosses(torch.Generator().manual_seed(9), 40)
for step in range(1, 101):
    loss = lit.training_step(crosses(gen), gen)
    if step % 20 == 0:
        val, val_ema = lit.validate(held_out)
        print(f"step {step} loss {loss:.4f} val {val:.4f} val_ema {val_ema:.4f}")
