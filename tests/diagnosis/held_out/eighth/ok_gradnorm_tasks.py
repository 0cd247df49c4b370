"""Three regression heads on one trunk; task weights are balanced with GradNorm, two optimizers."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(60)
gen = torch.Generator().manual_seed(61)
SPREAD = torch.tensor([1.0, 12.0, 0.05])
MAPS = torch.randn(3, 20, 6, generator=gen) / 4


class Trunk(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, width), nn.ReLU())
        self.shared = nn.Linear(width, width)
        self.heads = nn.ModuleList(nn.Linear(width, 6) for _ in range(3))

    def forward(self, x):
        h = torch.relu(self.shared(self.body(x)))
        return [head(h) for head in self.heads]


class TaskWeights(nn.Module):
    def __init__(self, tasks):
        super().__init__()
        self.w = nn.Parameter(torch.ones(tasks))

    def renormalise(self):
        with torch.no_grad():
            self.w.clamp_(min=0.02)
            self.w.mul_(len(self.w) / self.w.sum())


def batch(n=64):
    x = torch.randn(n, 20, generator=gen)
    return x, [SPREAD[k] * torch.tanh(x @ MAPS[k]) for k in range(3)]


trunk, weights = Trunk(), TaskWeights(3)
MODULES = [trunk, weights]
watch(*MODULES)
opt = torch.optim.Adam(trunk.parameters(), lr=3e-3)
opt_w = torch.optim.SGD(weights.parameters(), lr=0.05)
scaler = torch.amp.GradScaler("cpu", init_scale=4096.0, growth_interval=15)
first = None
ALPHA = 0.5
for it in range(1, 71):
    x, targets = batch()
    with torch.autocast("cpu", dtype=torch.float16):
        outs = trunk(x)
    losses = torch.stack([F.mse_loss(o.float(), t) for o, t in zip(outs, targets)])
    if first is None:
        first = losses.detach()
    scale = scaler.get_scale()
    norms = []
    for k in range(3):
        scaled = scaler.scale(losses[k])
        g, = torch.autograd.grad(scaled, trunk.shared.weight, retain_graph=True)
        norms.append(g.float().norm() / scale)
    G = weights.w * torch.stack(norms)
    usable = bool(torch.isfinite(G).all())

    opt.zero_grad()
    scaler.scale((weights.w.detach() * losses).sum()).backward()
    scaler.step(opt)
    scaler.update()

    if usable:
        with torch.no_grad():
            rate = losses / first
            goal = G.mean() * (rate / rate.mean()) ** ALPHA
        opt_w.zero_grad()
        (G - goal).abs().sum().backward()
        opt_w.step()
        weights.renormalise()
    if it % 14 == 0:
        w = [round(v, 3) for v in weights.w.tolist()]
        print(f"{it} losses {[round(v, 4) for v in losses.tolist()]} weights {w} scale {scaler.get_scale():.0f}")
