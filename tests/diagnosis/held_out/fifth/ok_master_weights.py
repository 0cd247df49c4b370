import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(91)


class PointNetMini(nn.Module):
    def __init__(self):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 64))
        self.glob = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, pts):
        return self.glob(self.local(pts).amax(1)).squeeze(-1)


net = PointNetMini().half()
MODULES = [net]
watch(*MODULES)
params = list(net.parameters())
dtype = params[0].dtype
master = [p.detach().clone().float().requires_grad_(True) for p in params]
opt = torch.optim.Adam(master, lr=2e-4)
LOSS_SCALE = 1024.0
gen = torch.Generator().manual_seed(910)
hist = []
for step in range(90):
    radii = torch.rand(16, 3, generator=gen) + 0.3
    d = torch.randn(16, 40, 3, generator=gen)
    pts = d / d.norm(dim=-1, keepdim=True) * radii[:, None]
    target = radii.prod(1)
    loss = (net(pts.to(dtype)).float() - target).square().mean()
    net.zero_grad()
    (loss * LOSS_SCALE).backward()
    finite = all(p.grad.isfinite().all() for p in params)
    if finite:
        for m, p in zip(master, params):
            m.grad = p.grad.float() / LOSS_SCALE
        opt.step()
        with torch.no_grad():
            for m, p in zip(master, params):
                p.copy_(m)
    hist.append(loss.item())
print(sum(hist[:10]) / 10, sum(hist[-10:]) / 10)
