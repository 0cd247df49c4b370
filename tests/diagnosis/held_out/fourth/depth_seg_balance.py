import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(13)


class TwoHead(nn.Module):
    def __init__(self, w=16):
        super().__init__()
        self.stem = nn.Conv2d(3, w, 3, padding=1)
        self.mid = nn.Conv2d(w, w, 3, padding=1)
        self.seg = nn.Conv2d(w, 4, 1)
        self.dep = nn.Conv2d(w, 1, 1)

    def forward(self, x):
        h = F.relu(self.mid(F.relu(self.stem(x))))
        return self.seg(h), self.dep(h).squeeze(1)


class LossBalancer:
    """Keeps both tasks at the same level with the help of running averages of the two losses."""

    def __init__(self, names, momentum=0.9):
        self.avg = {n: None for n in names}
        self.momentum = momentum

    def update(self, losses):
        for n, v in losses.items():
            v = v.detach().float()
            self.avg[n] = v if self.avg[n] is None else self.momentum * self.avg[n] + (1 - self.momentum) * v  # CAUSE

    def combine(self, losses):
        mean = sum(self.avg.values()) / len(self.avg)
        return sum((mean / self.avg[n]) * l for n, l in losses.items())  # CAUSE


def scale_invariant(pred, depth, lam=0.5):
    diff = (pred - depth.to(pred.dtype)).flatten(1)
    n = diff.shape[1]
    return (diff.square().sum(1) / n - lam * diff.sum(1).square() / n ** 2).mean()


class Scenes:
    def __init__(self, seed, size=16):
        self.g = torch.Generator().manual_seed(seed)
        self.size = size

    def next(self, n=8):
        s = self.size
        img = torch.rand(n, 3, s, s, generator=self.g)
        seg = (img.mean(1) * 4).long().clamp(0, 3)
        far = torch.rand(n, 1, 1, generator=self.g)
        depth = 1.5 * img[:, 0] - img[:, 2] + 0.3 * far
        return img, seg, depth


net = TwoHead()
MODULES = [net]
watch(*MODULES)
scenes = Scenes(44)
balancer = LossBalancer(["seg", "depth"])
opt = torch.optim.Adam(net.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

for k in range(60):
    img, seg, depth = scenes.next()
    if k == 28:
        depth[3] = depth[3] + 15.0  # aerial frame
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        seg_logits, dep = net(img)
        losses = {"seg": F.cross_entropy(seg_logits, seg), "depth": scale_invariant(dep, depth)}
    balancer.update(losses)
    total = balancer.combine(losses)
    scaler.scale(total).backward()
    scaler.step(opt)
    scaler.update()
    if k % 6 == 0:
        print(f"{k:02d} " + " ".join(f"{n}={v.item():.4f}" for n, v in losses.items()))
