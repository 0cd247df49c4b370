import collections
import statistics
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(71)


class SpikeGuard:
    """Drops an update whose gradient norm is far above the median of the accepted ones."""

    def __init__(self, window=32, ratio=1.7, warmup=10):
        self.norms = collections.deque(maxlen=window)
        self.ratio, self.warmup = ratio, warmup
        self.rejected = 0

    def accept(self, parameters):
        grads = [p.grad for p in parameters if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in grads])).item()  # CAUSE
        if len(self.norms) >= self.warmup and norm > self.ratio * statistics.median(self.norms):  # CAUSE
            self.rejected += 1
            return False
        self.norms.append(norm)
        return True


class GatedTCN(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.inp = nn.Conv1d(3, c, 1)
        self.f = nn.ModuleList(nn.Conv1d(c, c, 2, dilation=2 ** i) for i in range(4))
        self.g = nn.ModuleList(nn.Conv1d(c, c, 2, dilation=2 ** i) for i in range(4))
        self.out = nn.Conv1d(c, 1, 1)

    def forward(self, x):
        h = self.inp(x)
        for f, g in zip(self.f, self.g):
            y = torch.tanh(f(h)) * torch.sigmoid(g(h))
            h = h[..., -y.shape[-1]:] + y
        return self.out(h)[:, 0]


gen = torch.Generator().manual_seed(14)


def windows(n=24, length=32):
    t = torch.arange(length) * 0.2
    ph = 6.28 * torch.rand(n, 3, 1, generator=gen)
    w = torch.tensor([0.7, 1.1, 1.9])[None, :, None]
    x = torch.sin(w * t + ph) + 0.1 * torch.randn(n, 3, length, generator=gen)
    y = x[:, 0] * x[:, 1].roll(2, -1) + 0.5 * x[:, 2].roll(4, -1) + 2.0
    return x, y + 0.8 * torch.randn(n, length, generator=gen)


net = GatedTCN()
MODULES = [net]
watch(*MODULES)
opt = torch.optim.SGD(net.parameters(), lr=2e-4)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_factor=2.0, growth_interval=26)
guard = SpikeGuard()

for i in range(100):
    x, y = windows()
    with torch.autocast("cpu", dtype=torch.float16):
        pred = net(x)
        loss = F.mse_loss(pred, y[:, -pred.shape[1]:])
    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    if guard.accept(list(net.parameters())):
        scaler.step(opt)
        scaler.update()
    if i % 10 == 9:
        print(f"{i + 1} loss {loss.item():.4f} rejected {guard.rejected} scale {scaler.get_scale():g}")
