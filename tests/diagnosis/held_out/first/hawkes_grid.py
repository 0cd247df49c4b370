import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(23)


class NeuralIntensity(nn.Module):
    """piecewise constant intensity on a regular grid, driven by a small recurrent cell"""

    def __init__(self, n_marks, hidden):
        super().__init__()
        self.inp = nn.Linear(n_marks + 1, hidden)
        self.rec = nn.Linear(hidden, hidden, bias=False)
        self.rate = nn.Linear(hidden, 1)
        nn.init.orthogonal_(self.rec.weight, gain=0.9)

    def forward(self, counts, covar, dt):
        h = counts.new_zeros(counts.shape[0], self.rec.in_features)
        compensator = counts.new_zeros(counts.shape[0])
        log_term = []
        for i in range(counts.shape[1]):
            lam = F.softplus(self.rate(h)).squeeze(1)
            compensator = compensator + lam * dt  # CAUSE
            log_term.append(torch.log(lam) * counts[:, i].sum(1))
            h = torch.tanh(self.inp(torch.cat([counts[:, i], covar[:, i, None]], 1)) + self.rec(h))
        return compensator, torch.stack(log_term, 1).float().sum(1)


def simulate(batch, bins, dt, gen):
    t = torch.arange(bins) * dt
    covar = torch.sin(0.6 * t)[None].repeat(batch, 1)
    base = 2.2 + 1.4 * covar
    counts = torch.zeros(batch, bins, 2)
    excite = torch.zeros(batch)
    for i in range(bins):
        ev = (torch.rand(batch, generator=gen) < (base[:, i] + excite) * dt).float()
        mark = (torch.rand(batch, generator=gen) < 0.7).float()
        counts[:, i, 0], counts[:, i, 1] = ev * mark, ev * (1 - mark)
        excite = 0.9 * excite + 0.5 * ev
    return counts, covar


gen = torch.Generator().manual_seed(230)
model = NeuralIntensity(2, 24).to(torch.bfloat16)
MODULES = [model]
watch(*MODULES)
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
BINS, DT = 800, 0.02

for it in range(30):
    counts, covar = simulate(8, BINS, DT, gen)
    comp, logl = model(counts.to(torch.bfloat16), covar.to(torch.bfloat16), DT)
    nll = (comp.float() - logl).mean()
    opt.zero_grad()
    (nll / BINS).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if it % 5 == 0:
        print(f"{it:3d} nll {nll.item():.3f} expected {comp.float().mean().item():.2f} observed {counts.sum((1, 2)).mean().item():.2f}")
