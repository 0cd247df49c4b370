import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(40)


def warp(img, flow):
    n, _, h, w = img.shape
    ys, xs = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    gx = (xs + flow[:, 0]) / (w - 1) * 2 - 1
    gy = (ys + flow[:, 1]) / (h - 1) * 2 - 1
    return F.grid_sample(img.float(), torch.stack([gx, gy], -1).float(), align_corners=True, padding_mode="border")


class LevelNet(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(6, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
                                 nn.ReLU(), nn.Conv2d(width, 2, 3, padding=1))

    def forward(self, a, b, flow):
        return flow + self.net(torch.cat([a, warp(b, flow), flow], 1))


class SpyNet(nn.Module):
    def __init__(self, levels=2):
        super().__init__()
        self.levels = nn.ModuleList(LevelNet() for _ in range(levels))

    def forward(self, a, b):
        pyr = [(a, b)]
        for _ in self.levels[1:]:
            pyr.insert(0, tuple(F.avg_pool2d(x, 2) for x in pyr[0]))
        flow = torch.zeros(len(a), 2, *pyr[0][0].shape[-2:])
        for i, (lvl, (x, y)) in enumerate(zip(self.levels, pyr)):
            if i:
                flow = 2 * F.interpolate(flow.float(), scale_factor=2, mode="nearest")
            flow = lvl(x, y, flow)
        return flow.float()


def pair(g, n=6, s=16):
    ramp = torch.linspace(-1, 1, s)
    shade = torch.stack([ramp.expand(s, s), ramp.view(s, 1).expand(s, s)]) * 1.5     # two lit directions
    image = shade + 0.1 * F.interpolate(torch.rand(n, 2, 5, 5, generator=g), size=(s, s), mode="bilinear")
    flow = ((torch.rand(n, 2, 1, 1, generator=g) - 0.5) * 4).expand(-1, -1, s, s)
    return warp(image, flow), image, flow


net = SpyNet()
MODULES = [net]
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
gen = torch.Generator().manual_seed(400)
watch(*MODULES)
epe_log = []
with torch.autocast("cpu", dtype=torch.float16):  # CAUSE
    for step in range(1, 81):
        first, second, gt = pair(gen)
        flow = net(first, second)
        epe = ((flow - gt).pow(2).sum(1) + 1e-6).sqrt().mean()
        optimizer.zero_grad()
        scaler.scale(epe).backward()
        scaler.step(optimizer)
        scaler.update()
        epe_log.append(epe.item())
        if step % 20 == 0:
            print(step, sum(epe_log[-20:]) / 20)
