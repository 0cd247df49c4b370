import math
import torch
from torch import nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(20)

D, LATENT, B = 196, 8, 32
LOSS_SCALE = 16.0


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(D, 96), nn.Tanh())
        self.mu, self.logvar = nn.Linear(96, LATENT), nn.Linear(96, LATENT)
        self.dec = nn.Sequential(nn.Linear(LATENT, 96), nn.Tanh(), nn.Linear(96, D))

    def forward(self, x, noise):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h).clamp(-8, 8)
        z = mu + noise * torch.exp(0.5 * logvar)
        return self.dec(z), mu, logvar


def elbo(x_hat, x, mu, logvar, beta):
    rec = (x_hat - x).square().sum()  # CAUSE
    kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum()
    return (rec + beta * kl) / x.shape[0]


class MasterSGD:
    """fp32 copies of half weights, static loss scale (the FP16_Optimizer recipe)"""

    def __init__(self, model, lr, momentum=0.9):
        self.model_params = list(model.parameters())
        self.master = [p.detach().clone().float() for p in self.model_params]
        self.opt = torch.optim.SGD(self.master, lr=lr, momentum=momentum)
        self.skipped = 0

    def step(self):
        grads = [p.grad.float() / LOSS_SCALE for p in self.model_params]
        if not all(torch.isfinite(g).all() for g in grads):
            self.skipped += 1
            return False
        for m, g in zip(self.master, grads):
            m.grad = g
        torch.nn.utils.clip_grad_norm_(self.master, 20.0)
        self.opt.step()
        with torch.no_grad():
            for p, m in zip(self.model_params, self.master):
                p.copy_(m)
        return True

    def zero_grad(self):
        for p in self.model_params:
            p.grad = None


gen = torch.Generator().manual_seed(77)
basis = torch.randn(LATENT, D, generator=gen)


def make_batch(contrast):
    code = torch.randn(B, LATENT, generator=gen)
    img = code @ basis / math.sqrt(LATENT) + 0.3 * torch.randn(B, D, generator=gen)
    return (contrast * img).half()


model = VAE().half()
MODULES = [model]
watch(*MODULES)
optim = MasterSGD(model, lr=2e-4)
history = []
for it in range(70):
    contrast = 1.2 + 2.3 * torch.rand(1, generator=gen).item() ** 3
    x = make_batch(contrast)
    noise = torch.randn(B, LATENT, generator=gen).half()
    x_hat, mu, logvar = model(x, noise)
    loss = elbo(x_hat, x, mu, logvar, beta=min(1.0, it / 40))
    optim.zero_grad()
    (loss * LOSS_SCALE).backward()
    moved = optim.step()
    history.append(loss.item())
    if it % 10 == 9:
        print(it + 1, "elbo", round(history[-1], 2), "skipped so far", optim.skipped, "moved", moved)
