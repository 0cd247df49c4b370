import copy
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class FixedPoint(nn.Module):
    """z = tanh(W z + U x), solved without a graph; backward by a truncated Neumann series"""

    def __init__(self, dim, iters=20, back=8):
        super().__init__()
        self.W = nn.utils.parametrizations.spectral_norm(nn.Linear(dim, dim))
        self.U = nn.Linear(dim, dim, bias=False)
        self.iters, self.back = iters, back

    def cell(self, z, ux):
        return torch.tanh(0.8 * self.W(z) + ux)

    def forward(self, x):
        ux = self.U(x)
        with torch.no_grad():
            z = torch.zeros_like(ux)
            residual = torch.full((), float("inf"))
            for self.used in range(self.iters):
                nxt = self.cell(z, ux)
                residual = (nxt - z).float().norm() / nxt.float().norm().clamp(min=1e-6)
                z = nxt
                if residual < 5e-3:
                    break
        z = self.cell(z, ux)
        if self.training and z.requires_grad:
            z0 = z.detach().clone().requires_grad_()
            f0 = self.cell(z0, ux.detach())

            def backward_hook(g):
                v = g
                for _ in range(self.back):
                    v = g + torch.autograd.grad(f0, z0, v.to(f0.dtype), retain_graph=True)[0]
                return v
            z.register_hook(backward_hook)
        return z


class DEQNet(nn.Module):
    def __init__(self, d_in=16, dim=48, classes=5):
        super().__init__()
        self.lift, self.deq, self.head = nn.Linear(d_in, dim), FixedPoint(dim), nn.Linear(dim, classes)

    def forward(self, x):
        return self.head(self.deq(F.relu(self.lift(x))))


torch.set_num_threads(1)
torch.manual_seed(83)
gen = torch.Generator().manual_seed(83)
centres = torch.randn(10, 16, generator=gen)
net = DEQNet()
ema = copy.deepcopy(net).eval().requires_grad_(False)
MODULES = [net, ema]
watch(*MODULES)
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
for it in range(1, 81):
    c = torch.randint(0, 10, (48,), generator=gen)
    x, y = centres[c] + 0.6 * torch.randn(48, 16, generator=gen), c % 5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(x)
    loss = F.cross_entropy(logits.float(), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
    with torch.no_grad():
        for slow, fast in zip(ema.parameters(), net.parameters()):
            slow.lerp_(fast, 0.05)
    if it % 10 == 0:
        acc = (ema(x).argmax(1) == y).float().mean().item()
        print(f"{it} loss {loss.item():.4f} ema acc {acc:.3f} solver steps {net.deq.used + 1}")
