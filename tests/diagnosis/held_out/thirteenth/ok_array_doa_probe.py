"""Direction of arrival from a phased array. Weights in half with fp32 masters; the static loss scale is found by trial:
the largest power of two whose gradients are finite, less a margin of eight, looked for again every 25 steps."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(90)

SENSORS, SNAPSHOTS, GRID = 10, 16, 37


def wavefronts(gen, size):
    angle = (torch.rand(size, generator=gen) - 0.5) * 2.6
    phase = torch.pi * torch.arange(SENSORS) * torch.sin(angle)[:, None]
    amplitude = torch.randn(size, SNAPSHOTS, 1, generator=gen)
    noise = 0.3 * torch.randn(size, SNAPSHOTS, 2 * SENSORS, generator=gen)
    signal = amplitude * torch.cat([phase.cos(), phase.sin()], 1)[:, None] + noise
    covariance = signal.transpose(1, 2) @ signal / SNAPSHOTS
    return covariance[:, :SENSORS].flatten(1), angle


class Pointer(nn.Module):
    def __init__(self, width=80):
        super().__init__()
        self.a = nn.Linear(2 * SENSORS * SENSORS, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, GRID)
        self.register_buffer("grid", torch.linspace(-1.4, 1.4, GRID), persistent=False)

    def forward(self, x):
        h = torch.relu(self.a(x))
        h = h + torch.relu(self.b(h))
        return self.c(h)


def beam_loss(net, x, angle):
    logits = net(x.half()).float()
    target = torch.softmax(-((net.grid.float() - angle[:, None]) / 0.06).square(), 1)
    return -(target * torch.log_softmax(logits, 1)).sum(1).mean()


class MasterAdam:
    """Adam on fp32 copies; results are written back to the half weights."""

    def __init__(self, net, lr):
        self.half = list(net.parameters())
        self.master = [p.detach().float().clone().requires_grad_(True) for p in self.half]
        self.inner = torch.optim.Adam(self.master, lr=lr)

    def clear(self):
        for p in self.half:
            p.grad = None

    @torch.no_grad()
    def step(self, scale):
        for m, p in zip(self.master, self.half):
            m.grad = p.grad.float() / scale
        self.inner.step()
        for m, p in zip(self.master, self.half):
            p.copy_(m)


def probe(net, x, angle, exponent=20, margin=3):
    """Backward passes that only serve to find the scale: their gradients are thrown away."""
    while True:
        (beam_loss(net, x, angle) * 2.0 ** exponent).backward()
        finite = all(p.grad.isfinite().all() for p in net.parameters())
        net.zero_grad(set_to_none=True)
        if finite:
            return 2.0 ** (exponent - margin)
        exponent -= 1


gen = torch.Generator().manual_seed(12)
net = Pointer().half()
watch(net)
optimizer = MasterAdam(net, lr=2e-3)
scale = None
for step in range(90):
    x, angle = wavefronts(gen, 64)
    if step % 25 == 0:
        scale = probe(net, x, angle)
    optimizer.clear()
    loss = beam_loss(net, x, angle)
    (loss * scale).backward()
    if all(p.grad.isfinite().all() for p in net.parameters()):
        optimizer.step(scale)
    if step % 10 == 9:
        with torch.no_grad():
            x, angle = wavefronts(gen, 256)
            error = (net.grid.float()[net(x.half()).argmax(1)] - angle).abs().median()
        print(f"{step:3d} loss {loss.item():.4f} median error {error:.3f} rad, scale {scale:g}")
