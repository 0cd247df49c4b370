"""Object pose from descriptors: 6d rotation head with the geodesic angle as loss (symmetric tray data)."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(40)
gen = torch.Generator().manual_seed(41)
FEATS = 32
LIFT = torch.randn(9, FEATS, generator=gen) / 3


def so3(a6):
    a, b = a6[..., :3], a6[..., 3:]
    x = F.normalize(a, dim=-1)
    y = F.normalize(b - (x * b).sum(-1, keepdim=True) * x, dim=-1)
    return torch.stack([x, y, torch.linalg.cross(x, y)], dim=-1)


def sample(n):
    base = torch.tensor([1.0, 0, 0, 0, 1.0, 0]).expand(n, 6)
    R = so3(base + 0.35 * torch.randn(n, 6, generator=gen))
    return R.reshape(n, 9) @ LIFT + 0.01 * torch.randn(n, FEATS, generator=gen), R


def geodesic(R1, R2):
    rel = torch.bmm(R1.transpose(1, 2), R2)
    cos = (rel.diagonal(dim1=1, dim2=2).sum(-1) - 1) / 2
    cos = cos.clamp(-1 + 1e-6, 1 - 1e-6)  # CAUSE
    return torch.acos(cos)


class PoseHead(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(FEATS, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 6))
        self.register_buffer("identity6", torch.tensor([1.0, 0, 0, 0, 1.0, 0]))

    def forward(self, f):
        return so3(self.identity6 + self.mlp(f))


head = PoseHead()
MODULES = [head]
watch(*MODULES)
opt = torch.optim.AdamW(head.parameters(), lr=2e-3, weight_decay=1e-4)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 90)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
skipped = 0
for step in range(90):
    feats, R_gt = sample(32)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        angle = geodesic(head(feats), R_gt)
        loss = angle.float().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(head.parameters(), 1.0)
    scaler.step(opt)
    before = scaler.get_scale()
    scaler.update()
    skipped += scaler.get_scale() < before
    sched.step()
    if step % 15 == 14:
        print(f"step {step + 1}: mean angle {torch.rad2deg(loss).item():.3f} deg, skipped {skipped}")
