import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(89)
GRID = 12


class PillarNet(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.c = c
        self.point = nn.Sequential(nn.Linear(7, c), nn.LayerNorm(c), nn.ReLU(), nn.Linear(c, c))
        self.back = nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.ReLU(), nn.Conv2d(c, c, 3, padding=2, dilation=2), nn.ReLU())
        self.heat = nn.Conv2d(c, 1, 1)
        self.box = nn.Conv2d(c, 2, 1)
        nn.init.constant_(self.heat.bias, -2.2)

    def forward(self, pts):
        # pts (P, 4): x, y in cells, z, intensity
        cell = pts[:, :2].long()
        idx = cell[:, 0] * GRID + cell[:, 1]
        feat = torch.cat([pts, pts[:, :2] - cell - 0.5, pts[:, 2:3].square()], 1)
        f = self.point(feat)
        pillars = f.new_full((GRID * GRID, self.c), float("-inf"))
        pillars = pillars.scatter_reduce(0, idx[:, None].expand_as(f), f, "amax", include_self=True)
        pillars = pillars.masked_fill(pillars == float("-inf"), 0.0)
        bev = self.back(pillars.T.reshape(1, self.c, GRID, GRID))
        return self.heat(bev)[0, 0], self.box(bev)[0]


def focal(logit, target):
    p = logit.float().sigmoid()
    ce = nn.functional.binary_cross_entropy_with_logits(logit.float(), target, reduction="none")
    pt = torch.where(target > 0, p, 1 - p)
    return ((1 - pt) ** 2 * ce).sum() / target.sum().clamp(min=1.0)


def sweep(gen):
    n = int(torch.randint(0, 4, (1,), generator=gen))
    pts = [torch.rand(60, 4, generator=gen) * torch.tensor([GRID, GRID, 0.2, 0.3])]
    heat, off = torch.zeros(GRID, GRID), torch.zeros(2, GRID, GRID)
    for _ in range(n):
        c = 1.5 + torch.rand(2, generator=gen) * (GRID - 3)
        obj = torch.randn(25, 4, generator=gen) * torch.tensor([0.3, 0.3, 0.4, 0.1]) + torch.cat([c, torch.tensor([1.5, 0.8])])
        pts.append(obj)
        i, j = c.long().tolist()
        heat[i, j], off[:, i, j] = 1.0, c - c.long()
    pts = torch.cat(pts)
    pts[:, :2] = pts[:, :2].clamp(0, GRID - 1e-3)
    return pts, heat, off


gen = torch.Generator().manual_seed(97)
net = PillarNet()
MODULES = [net]
opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
watch(*MODULES)
for it in range(100):
    pts, heat, off = sweep(gen)
    with torch.autocast("cpu", dtype=torch.float16):
        h, b = net(pts)
    hit = heat > 0
    loss = focal(h, heat)
    if hit.any():
        loss = loss + nn.functional.l1_loss(b.float()[:, hit], off[:, hit])
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 10.0)
    scaler.step(opt)
    scaler.update()
    if it % 20 == 0:
        print(it, int(hit.sum()), round(loss.item(), 4))
