"""Learned visual odometry: per-frame motion is regressed and supervised by reprojection of sparse points."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(77)
gen = torch.Generator().manual_seed(78)
POINTS = 48
FOCAL = 0.8


class Motion(nn.Module):
    """two-view descriptor -> small rotation vector and translation"""

    def __init__(self, d=24, width=64):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.rot = nn.Linear(width, 3)
        self.trans = nn.Linear(width, 3)

    def forward(self, d):
        h = self.enc(d)
        return 0.02 * torch.tanh(self.rot(h)), 0.1 * torch.tanh(self.trans(h))


def move(points, w, t):
    rotated = points + torch.linalg.cross(w.unsqueeze(1).expand_as(points), points)
    return rotated + t.unsqueeze(1)


def pinhole(cam):
    depth = cam[..., 2:].clamp(min=1e-3)
    return FOCAL * cam[..., :2] / depth  # CAUSE


MIX = torch.randn(6, 24, generator=gen)


def sequence(n, corridor):
    w, t = 0.01 * torch.randn(n, 3, generator=gen), 0.04 * torch.randn(n, 3, generator=gen).clamp(-2, 2)
    pts = torch.rand(n, POINTS, 3, generator=gen) * torch.tensor([4.0, 3.0, 6.0]) + torch.tensor([-2.0, -1.5, 2.0])
    if corridor:
        pts[0, :40, 2] = 0.04 * torch.rand(40, generator=gen) - t[0, 2]
        pts[0, :40, 0] = 1.8
    cam = move(pts, w, t)
    seen = FOCAL * cam[..., :2] / cam[..., 2:].clamp(min=1e-3)
    desc = torch.cat([w * 50, t * 12], 1) @ MIX + 0.05 * torch.randn(n, 24, generator=gen)
    return desc, pts, seen


net = Motion().half()
MODULES = [net]
watch(*MODULES)
master = [p.detach().clone().float().requires_grad_(True) for p in net.parameters()]
opt = torch.optim.Adam(master, lr=2e-3)
LOSS_SCALE = 2.0
dropped = []
for step in range(1, 81):
    desc, pts, seen = sequence(16, corridor=step % 13 == 0)
    dt = net.rot.weight.dtype
    w, t = net(desc.to(dt))
    uv = pinhole(move(pts.to(dt), w, t))
    loss = F.smooth_l1_loss(uv.float(), seen, beta=0.02)
    net.zero_grad()
    (loss * LOSS_SCALE).backward()
    for m, p in zip(master, net.parameters()):
        m.grad = p.grad.float() / LOSS_SCALE
    total = torch.nn.utils.clip_grad_norm_(master, 1.0)
    if torch.isfinite(total):
        opt.step()
        with torch.no_grad():
            for m, p in zip(master, net.parameters()):
                p.copy_(m)
    else:
        dropped.append(step)
    if step % 20 == 0:
        print(f"{step} reprojection {loss.item():.4f} grad norm {total.item():.3f} dropped {dropped}")
