"""Point-cloud autoencoder on aerial LiDAR tiles (FoldingNet style decoder, Chamfer distance)."""
import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(3)
torch.set_num_threads(1)

NPTS, BATCH, STEPS = 64, 6, 60


class PointEncoder(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.lift = nn.Conv1d(3, 32, 1)
        self.norm = nn.GroupNorm(4, 32)
        self.top = nn.Conv1d(32, width, 1)

    def forward(self, pts):
        h = F.relu(self.norm(self.lift(pts.transpose(1, 2))))
        return self.top(h).amax(-1)


class FoldingDecoder(nn.Module):
    def __init__(self, width=64, npts=NPTS):
        super().__init__()
        side = int(npts ** 0.5)
        u = torch.linspace(-1, 1, side)
        self.register_buffer("grid", torch.stack(torch.meshgrid(u, u, indexing="ij"), -1).reshape(-1, 2))
        self.fold = nn.Sequential(nn.Linear(width + 2, 64), nn.ReLU(), nn.Linear(64, 3))
        self.shift = nn.Linear(3, 3)

    def forward(self, z, centre):
        g = self.grid.expand(z.size(0), -1, -1)
        h = torch.cat([z[:, None].expand(-1, g.size(1), -1), g], -1)
        return self.fold(h) * 4 + self.shift(centre)[:, None]


def pairwise(x, y):
    xx, yy, zz = torch.bmm(x, x.mT), torch.bmm(y, y.mT), torch.bmm(x, y.mT)
    rx = torch.diagonal(xx, dim1=1, dim2=2).unsqueeze(2)
    ry = torch.diagonal(yy, dim1=1, dim2=2).unsqueeze(1)
    return rx + ry - 2 * zz  # CAUSE


def chamfer(pred, gt):
    dist = pairwise(pred, gt)
    return dist.min(1)[0].float().mean() + dist.min(2)[0].float().mean()


def read_strip(gen):
    """tiles are drawn along the strips; coordinates are metres from the project origin"""
    for i in range(STEPS):
        origin = torch.tensor([2.0, 3.0, 1.0])
        if torch.rand(1, generator=gen) < 0.05:  # the one strip across the river
            origin = torch.tensor([205.0, 60.0, 5.0])
        centre = origin + torch.rand(BATCH, 3, generator=gen) * 2
        local = torch.randn(BATCH, NPTS, 3, generator=gen) * torch.tensor([5.0, 5.0, 1.0])
        yield centre[:, None] + local


encoder, decoder = PointEncoder(), FoldingDecoder()
with torch.no_grad():
    decoder.shift.weight.copy_(torch.eye(3))
MODULES = [encoder, decoder]
params = [p for m in MODULES for p in m.parameters()]
opt = torch.optim.AdamW(params, lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 5)
watch(*MODULES)

for step, cloud in enumerate(read_strip(torch.Generator().manual_seed(11)), 1):
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        centre = cloud.mean(1)
        rec = decoder(encoder(cloud - centre[:, None]), centre)
        loss = chamfer(rec, cloud)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(params, 5.0)
    scaler.step(opt)
    scaler.update()
    if step % 10 == 0:
        print(f"tile {step:3d}  chamfer {loss.item():.4f}  scale {scaler.get_scale():g}")
