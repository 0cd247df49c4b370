import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 64), nn.GELU(), nn.Linear(64, 48), nn.GELU())
        self.heads = nn.ModuleList([nn.Linear(48, 3), nn.Linear(48, 1), nn.Linear(48, 2)])

    def forward(self, x):
        h = self.trunk(x)
        return [head(h) for head in self.heads]


def project(grads):
    """Yu et al. 2020: remove the conflicting component between every pair of tasks"""
    out = [g.clone() for g in grads]
    for i, g in enumerate(out):
        for j, other in enumerate(grads):
            if i != j:
                dot = torch.dot(g, other)
                if dot < 0:
                    g -= dot / other.pow(2).sum().clamp(min=1e-12) * other
    return sum(out)


class Trainer:
    spike = 25.0

    def __init__(self, net):
        self.net = net
        self.params = list(net.parameters())
        self.opt = torch.optim.Adam(self.params, lr=3e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        self.dropped = 0

    def task_grads(self, losses):
        flat = []
        for l in losses:
            gs = torch.autograd.grad(self.scaler.scale(l), self.params, retain_graph=True, allow_unused=True)
            flat.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(self.params, gs)]))
        return flat

    def step(self, losses):
        merged = project(self.task_grads(losses))
        norm = merged.norm()
        if torch.isfinite(norm) and norm > self.spike:  # CAUSE
            self.dropped += 1
            return
        at = 0
        for p in self.params:
            p.grad = merged[at:at + p.numel()].view_as(p).clone()
            at += p.numel()
        self.scaler.step(self.opt)
        self.scaler.update()


def draw(gen, n=64):
    x = torch.randn(n, 12, generator=gen)
    cls = x[:, :3].argmax(1)
    reg = (x[:, 3:6].sum(1, keepdim=True) * 0.5).tanh()
    sign = (x[:, 6] * x[:, 0] > 0).long()
    return x, cls, reg, sign


torch.set_num_threads(1)
torch.manual_seed(36)
gen = torch.Generator().manual_seed(36)
net = Shared()
MODULES = [net]
trainer = Trainer(net)
watch(*MODULES)
for it in range(80):
    x, cls, reg, sign = draw(gen)
    with torch.autocast("cpu", dtype=torch.float16):
        a, b, c = net(x)
    losses = [F.cross_entropy(a.float(), cls), F.mse_loss(b.float(), reg), F.cross_entropy(c.float(), sign)]
    trainer.step(losses)
    if it % 16 == 15:
        print(it + 1, [round(l.item(), 4) for l in losses], "dropped", trainer.dropped)
