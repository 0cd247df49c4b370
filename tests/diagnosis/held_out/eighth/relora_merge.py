"""Parameter-efficient continued pretraining: low-rank deltas are folded into the base layer and restarted."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


torch.set_num_threads(1)
torch.manual_seed(3)
gen = torch.Generator().manual_seed(31)
DIM = 96


class FoldingLinear(nn.Module):
    def __init__(self, weight, rank=8, scaling=1.0):
        super().__init__()
        out, inp = weight.shape
        self.scaling = scaling
        self.weight = nn.Parameter(weight.bfloat16(), requires_grad=False)
        self.register_buffer("down", torch.empty(rank, inp))
        self.up = nn.Parameter(torch.zeros(out, rank))
        self.restart()

    def restart(self):
        with torch.no_grad():
            self.down.copy_(torch.randn(self.down.shape, generator=gen) / self.down.shape[1] ** 0.5)
            self.up.zero_()

    @torch.no_grad()
    def fold(self):
        delta = self.up @ self.down * self.scaling
        self.weight.add_(delta.to(self.weight.dtype))  # CAUSE
        self.restart()

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype)) + F.linear(F.linear(x, self.down), self.up) * self.scaling


class Net(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.lift = nn.Linear(6, DIM)
        self.lift.requires_grad_(False)
        self.fold_fc = FoldingLinear(w)

    def forward(self, z):
        return self.fold_fc(torch.tanh(self.lift(z))) / DIM ** 0.5


def pretrained():
    s = torch.randint(0, 2, (DIM, DIM), generator=gen) * 2.0 - 1
    return s * (0.55 + 0.4 * torch.rand(DIM, DIM, generator=gen))


def shifted(w, amount):
    u, v = torch.randn(DIM, 3, generator=gen), torch.randn(3, DIM, generator=gen)
    return w + amount * (u @ v) / 3 ** 0.5


W = pretrained()
W_SHIFTED = shifted(W, 0.02)
net = Net(W)
MODULES = [net]


def batch(n=64):
    z = torch.randn(n, 6, generator=gen)
    return z, F.linear(torch.tanh(net.lift(z)), W_SHIFTED) / DIM ** 0.5


def fresh_optimizer():
    return torch.optim.Adam([net.fold_fc.up], lr=8e-4)


watch(*MODULES)
opt = fresh_optimizer()
for step in range(1, 121):
    z, y = batch()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = net(z)
    loss = F.mse_loss(out.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    if step % 4 == 0:
        net.fold_fc.fold()
        opt = fresh_optimizer()
    if step == 1 or step % 20 == 0:
        same = (net.fold_fc.weight.float() == W.bfloat16().float()).float().mean().item()
        print(f"step {step} loss {loss.item():.2e} base entries unchanged {same:.3f}")
