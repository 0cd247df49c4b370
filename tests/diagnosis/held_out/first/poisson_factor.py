"""Bayesian Poisson matrix model, full-data ELBO (sums, not means)."""
import math
import torch
import torch.nn as nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


class VariationalLinear(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(o, i) / math.sqrt(i))
        self.rho = nn.Parameter(torch.full((o, i), -5.0))
        self.bias = nn.Parameter(torch.zeros(o))

    def forward(self, x, gen):
        sd = nn.functional.softplus(self.rho)
        w = self.mu + sd * torch.randn(self.mu.shape, generator=gen)
        return nn.functional.linear(x, w, self.bias)

    def kl(self):
        sd = nn.functional.softplus(self.rho)
        return (0.5 * (sd.pow(2) + self.mu.pow(2) - 1) - sd.log()).sum()


class CountModel(nn.Module):
    def __init__(self, d, m):
        super().__init__()
        self.l1, self.l2 = VariationalLinear(d, 48), VariationalLinear(48, m)
        self.base = nn.Parameter(torch.full((m,), 6.0))

    def forward(self, x, gen):
        return self.base + 0.3 * self.l2(torch.tanh(self.l1(x, gen)), gen).float()

    def kl(self):
        return self.l1.kl() + self.l2.kl()


class SVI:
    def __init__(self, model, x, counts, seed):
        self.model, self.x, self.counts = model, x, counts
        self.gen = torch.Generator().manual_seed(seed)
        self.opt = torch.optim.Adam(model.parameters(), lr=1e-2)

    def step(self, n_batch=100):
        i = torch.randperm(len(self.x), generator=self.gen)[:n_batch]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            log_rate = self.model(self.x[i], self.gen)
        up = len(self.x) / n_batch
        loglik = up * (self.counts[i] * log_rate - log_rate.exp() - torch.lgamma(self.counts[i] + 1)).sum()
        neg_elbo = self.model.kl() - loglik
        self.opt.zero_grad(set_to_none=True)
        neg_elbo.backward()
        gn = nn.utils.clip_grad_norm_(self.model.parameters(), 1e5)
        self.opt.step()
        return neg_elbo.item(), gn.item()


torch.manual_seed(97)
g = torch.Generator().manual_seed(970)
x = torch.randn(800, 10, generator=g)
rate = torch.exp(6.5 + 0.4 * torch.tanh(x @ torch.randn(10, 30, generator=g)))
counts = torch.poisson(rate, generator=g)
model = CountModel(10, 30)
MODULES = [model]
watch(*MODULES)
svi = SVI(model, x, counts, 971)
for it in range(80):
    loss, gn = svi.step()
    if it % 10 == 0:
        print(f"{it:3d} -elbo {loss:.4e} grad norm {gn:.3e}")
