"""Importance-weighted VAE for single-cell counts, negative binomial likelihood. The count matrix is kept in half to fit in memory."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(77)

GENES, LATENT, CELLS, SAMPLES = 64, 6, 960, 3


def count_matrix(gen):
    """Counts with a library size for each cell; a few secretory cells express one gene thousands of times."""
    programme = torch.rand(5, GENES, generator=gen).pow(3)
    kind = torch.randint(5, (CELLS,), generator=gen)
    library = torch.exp(0.4 * torch.randn(CELLS, 1, generator=gen)) * 12
    counts = torch.poisson(programme[kind] * library, generator=gen)
    secretory = torch.randperm(CELLS, generator=gen)[:6]
    counts[secretory, 3] = torch.randint(2500, 11000, (6,), generator=gen).float()
    return counts.half()


def nb_log_prob(x, mu, theta):
    log_mix = torch.log(theta + mu)
    return (torch.lgamma(x + theta) - torch.lgamma(x + 1) - torch.lgamma(theta)  # CAUSE
            + theta * (torch.log(theta) - log_mix) + x * (torch.log(mu) - log_mix))


class Block(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.Linear(i, o), nn.LayerNorm(o), nn.SiLU())


class CountVAE(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.encoder = nn.Sequential(Block(GENES, width), Block(width, width))
        self.stats = nn.Linear(width, 2 * LATENT)
        self.decoder = nn.Sequential(Block(LATENT, width), Block(width, width))
        self.rate = nn.Linear(width, GENES)
        self.dispersion = nn.Linear(width, GENES)

    def forward(self, x):
        h = self.encoder(torch.log1p(x))
        mean, log_var = self.stats(h).float().chunk(2, 1)
        noise = torch.randn(SAMPLES, *mean.shape)
        z = mean + noise * torch.exp(0.5 * log_var)
        d = checkpoint(self.decoder, z, use_reentrant=False)
        share = torch.softmax(self.rate(d), -1)
        theta = F.softplus(self.dispersion(d)) + 1e-2
        mu = share * x.sum(1, keepdim=True) + 1e-2
        log_prior = -0.5 * z.square().sum(-1)
        log_posterior = -0.5 * (noise.square() + log_var).sum(-1)
        return mu, theta, log_prior - log_posterior


def loader(counts, gen, size=24):
    while True:
        for rows in torch.randperm(len(counts), generator=gen).split(size):
            yield counts[rows]


gen = torch.Generator().manual_seed(2024)
counts = count_matrix(gen)
vae = CountVAE()
watch(vae)
optimizer = torch.optim.Adam(vae.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 6, growth_interval=400)

for step, x in zip(range(80), loader(counts, gen)):
    with torch.autocast("cpu", dtype=torch.float16):
        mu, theta, log_ratio = vae(x)
        log_prob = nb_log_prob(x, mu, theta)
    log_weight = log_prob.float().sum(-1) + min(1.0, step / 60) * log_ratio
    bound = torch.logsumexp(log_weight, 0) - math.log(SAMPLES)
    loss = -bound.mean() / GENES
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(vae.parameters(), 5.0)
    scaler.step(optimizer)
    scaler.update()
    if step % 8 == 0:
        print(f"{step:3d} loss {loss.item():.4f} scale {scaler.get_scale():g}")
