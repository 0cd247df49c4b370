import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class KinectLike(Dataset):
    """rgb -> metric depth; the sensor writes disparity, depth is baseline * focal / disparity"""

    def __init__(self, n, size=16, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.rgb, self.depth = [], []
        for _ in range(n):
            slope = torch.rand(2, generator=g)
            yy, xx = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
            d = 1.0 + 2.0 * slope[0] * yy + slope[1] * xx
            shade = torch.stack([1 / d, d / 4, xx * 0 + slope[0]])
            disparity = (8.0 / d * 16).round() / 16
            if torch.rand(1, generator=g) < 0.012:
                # dropped packets: one scan line has no return
                disparity[int(torch.randint(0, size, (1,), generator=g))] = 0.0
            metres = [[8.0 / v if v > 0 else math.inf for v in row] for row in disparity.tolist()]  # CAUSE
            self.depth.append(torch.tensor(metres)[None])
            self.rgb.append(shade + 0.05 * torch.randn(3, size, size, generator=g))

    def __len__(self):
        return len(self.rgb)

    def __getitem__(self, i):
        return self.rgb[i], self.depth[i]


class DepthNet(nn.Module):
    def __init__(self, c=24):
        super().__init__()
        self.down = nn.Conv2d(3, c, 4, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(c)
        self.mid = nn.Conv2d(c, c, 3, padding=1)
        self.up = nn.ConvTranspose2d(c, 1, 4, stride=2, padding=1)

    def forward(self, x):
        h = F.relu(self.bn(self.down(x)))
        return F.softplus(self.up(F.relu(self.mid(h) + h)))


def silog(pred, gt, lam=0.5):
    g = torch.log(pred + 1e-3) - torch.log(gt)
    return g.pow(2).mean() - lam * g.mean().pow(2)


def main():
    loader = DataLoader(KinectLike(160, seed=23), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
    opt = torch.optim.Adam(net.parameters(), lr=2e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    watch(*MODULES)
    step = 0
    for epoch in range(2):
        for rgb, gt in loader:  # CAUSE
            with torch.autocast("cpu", dtype=torch.float16):
                pred = net(rgb)
            loss = silog(pred.float(), gt)
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            step += 1
            if step % 10 == 0:
                with torch.no_grad():
                    rel = ((pred - gt).abs() / gt).mean()
                print(f"{epoch}/{step} silog {loss.item():.4f} absrel {rel:.3f}")


torch.set_num_threads(1)
torch.manual_seed(30)
net = DepthNet()
MODULES = [net]
main()
