import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(53)

CLIP, SIGMA, BATCH = 1.0, 0.3, 16


class PatientRisk(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(20, 48), nn.GroupNorm(4, 48), nn.SiLU(), nn.Linear(48, 3))

    def forward(self, x):
        return self.layers(x)


def private_gradient(net, xs, ys, scaler, noise_gen):
    """clip the gradient of every patient to CLIP, sum, add noise"""
    params = list(net.parameters())
    summed = [torch.zeros_like(p) for p in params]
    losses = []
    for x, y in zip(xs.split(1), ys.split(1)):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(net(x).float(), y)
        grads = torch.autograd.grad(scaler.scale(loss), params)
        norm = torch.stack([g.norm() for g in grads]).norm()
        coef = (CLIP / (norm + 1e-6)).clamp(max=1.0)  # CAUSE
        for s, g in zip(summed, grads):
            s.add_(g * coef)
        losses.append(loss.detach())
    for s in summed:
        s.add_(torch.randn(s.shape, generator=noise_gen), alpha=SIGMA * CLIP)
    return [s / len(xs) for s in summed], torch.stack(losses).mean()


gen = torch.Generator().manual_seed(71)
noise_gen = torch.Generator().manual_seed(72)
teacher = torch.randn(20, 3, generator=gen)
net = PatientRisk()
MODULES = [net]
opt = torch.optim.SGD(net.parameters(), lr=0.4, momentum=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 11)
watch(*MODULES)

for rnd in range(60):
    xs = torch.randn(BATCH, 20, generator=gen)
    ys = (xs @ teacher).argmax(1)
    grads, loss = private_gradient(net, xs, ys, scaler, noise_gen)
    for p, g in zip(net.parameters(), grads):
        p.grad = g
    scaler.step(opt)
    scaler.update()
    if rnd % 15 == 0:
        print(f"{rnd:3d} {loss.item():.3f}")
