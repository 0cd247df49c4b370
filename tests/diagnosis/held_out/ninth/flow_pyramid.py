"""Optical flow between two small frames, coarse to fine, with the usual per-level loss weights."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(42)
torch.set_num_threads(1)

LEVEL_WEIGHT = [0.005, 0.01, 0.02]
TASK_WEIGHT = dict(flow=0.001)         # the stereo task is trained elsewhere


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(2, 16, 5, padding=2)
        self.c2 = nn.Conv2d(16, 24, 3, stride=2, padding=1)
        self.c3 = nn.Conv2d(24, 32, 3, stride=2, padding=1)

    def forward(self, pair):
        a = F.leaky_relu(self.c1(pair), 0.1)
        b = F.leaky_relu(self.c2(a), 0.1)
        return a, b, F.leaky_relu(self.c3(b), 0.1)


class FlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = Encoder()
        self.heads = nn.ModuleList([nn.Conv2d(c, 2, 3, padding=1) for c in (16, 24, 32)])
        for h in self.heads:
            nn.init.normal_(h.weight, std=0.02)

    def forward(self, pair):
        return [head(f) for head, f in zip(self.heads, self.enc(pair))]


def multiscale_epe(flows, target):
    loss = 0.0
    for w, flow in zip(LEVEL_WEIGHT, flows):
        goal = F.adaptive_avg_pool2d(target, flow.shape[-2:])
        diff = flow.float() - goal  # CAUSE
        loss = loss + w * torch.sqrt(diff.pow(2).sum(1) + 1e-4).pow(0.8).mean()
    return loss


def pairs(gen, n=8, size=48):
    texture = F.interpolate(torch.rand(n, 1, 12, 12, generator=gen), size=size + 8, mode="bilinear")
    dx, dy = torch.randint(0, 5, (2, n), generator=gen)
    first = texture[..., 4:-4, 4:-4]
    second = torch.stack([t[:, 4 + y - 2:4 + y - 2 + size, 4 + x - 2:4 + x - 2 + size] for t, x, y in zip(texture, dx, dy)])
    flow = torch.stack([dx - 2, dy - 2], 1).float()[..., None, None].expand(-1, -1, size, size)
    return torch.cat([first, second], 1), flow / 4


net = FlowNet()
MODULES = [net]
optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, eps=1e-12)
gen = torch.Generator().manual_seed(9)
clips = [pairs(gen) for _ in range(3)]
before = [p.detach().clone() for p in net.parameters()]
watch(*MODULES)

for i in range(1, 91):
    frames, flow = clips[i % len(clips)]
    optimizer.zero_grad()
    with torch.autocast(device_type="cpu", dtype=torch.float16):
        prediction = net(frames)
    loss = TASK_WEIGHT["flow"] * multiscale_epe(prediction, flow)
    loss.backward()  # CAUSE
    optimizer.step()
    if i % 15 == 0:
        moved = sum((p - q).abs().sum() for p, q in zip(net.parameters(), before)).item()
        print(f"{i:3d} epe {loss.item() / TASK_WEIGHT['flow']:.5f} weights moved {moved:.5f}")
