"""Stochastic-gradient Langevin dynamics for a small Bayesian regressor (dose -> response)."""
import math
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(19)
N = 256


def experiments(seed):
    gen = torch.Generator().manual_seed(seed)
    dose = torch.rand(N, 1, generator=gen) * 2 - 1
    resp = torch.sin(3 * dose) + 0.3 * torch.randn(N, 1, generator=gen)
    return dose, resp


class Langevin(torch.optim.SGD):
    """x <- x - lr * grad(U / N) + sqrt(2 lr T / N) * xi, the noise goes in through the gradient."""

    def __init__(self, params, lr, temperature, seed=0):
        super().__init__(params, lr=lr)
        self.T, self.rng = temperature, torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def inject_noise(self):
        for group in self.param_groups:
            amp = math.sqrt(2 * self.T / (group["lr"] * N))
            for p in group["params"]:
                p.grad.add_(torch.randn(p.shape, generator=self.rng), alpha=amp)  # CAUSE


net = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
MODULES = [net]
sampler = Langevin(net.parameters(), lr=5e-3, temperature=1.0, seed=5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12, growth_interval=10 ** 6)
dose, resp = experiments(61)
probe = torch.linspace(-1.5, 1.5, 31)[:, None]
draws = []
pick = torch.Generator().manual_seed(2)
watch(*MODULES)

for n in range(1, 121):
    idx = torch.randint(0, N, (64,), generator=pick)
    with torch.autocast("cpu", dtype=torch.float16):
        mu = net(dose[idx])
    misfit = (mu.float() - resp[idx]).square().sum() / (2 * 0.3 ** 2) * (N / 64)
    prior = sum(p.square().sum() for p in net.parameters()) / 2
    sampler.zero_grad()
    scaler.scale((misfit + prior) / N).backward()
    sampler.inject_noise()
    scaler.step(sampler)
    scaler.update()
    if n > 40 and n % 4 == 0:
        with torch.no_grad():
            draws.append(net(probe))
    if n % 20 == 0:
        print(n, f"misfit {misfit.item() / N:.3f} prior {prior.item():.1f}")

spread = torch.stack(draws).std(0)
print(f"posterior spread inside {spread[5:26].mean().item():.4f} outside {torch.cat([spread[:5], spread[26:]]).mean().item():.4f}")
