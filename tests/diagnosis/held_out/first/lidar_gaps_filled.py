import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(19)
torch.set_num_threads(1)


def range_images(n, h=8, w=32, seed=0):
    """rays that hit nothing are stored as inf, broken diodes as nan (as in the raw files)"""
    g = torch.Generator().manual_seed(seed)
    col = torch.linspace(0, 6.2832, w)
    ph = 6.2832 * torch.rand(n, 1, 1, 1, generator=g)
    amp = 5 + 20 * torch.rand(n, 1, 1, 1, generator=g)
    r = amp * (1.2 + torch.sin(col + ph)) + torch.arange(h).view(1, 1, h, 1) + 0.2 * torch.randn(n, 1, h, w, generator=g)
    label = (torch.sin(col + ph) > 0.3).long().expand(n, 1, h, w).squeeze(1)
    u = torch.rand(r.shape, generator=g)
    sparse = r.clone()
    sparse[u < 0.1] = float("inf")
    sparse[u > 0.98] = float("nan")
    return sparse, label.contiguous(), r


class GatedConv(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.f, self.g = nn.Conv2d(cin, cout, 3, padding=1), nn.Conv2d(cin, cout, 3, padding=1)

    def forward(self, x):
        return F.silu(self.f(x)) * torch.sigmoid(self.g(x))


class CompletionNet(nn.Module):
    def __init__(self, c=16):
        super().__init__()
        self.a, self.b = GatedConv(2, c), GatedConv(c, c)
        self.depth, self.seg = nn.Conv2d(c, 1, 1), nn.Conv2d(c, 2, 1)

    def forward(self, raw):
        hit = torch.isfinite(raw)
        x = torch.nan_to_num(raw, nan=0.0, posinf=0.0).clamp(0, 120) / 20.0
        h = self.b(self.a(torch.cat([x, hit.to(x.dtype)], 1)))
        return self.depth(h) * 20.0, self.seg(h), hit


sparse, label, full = range_images(192, seed=5)
loader = DataLoader(TensorDataset(sparse, label), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(2))
net = CompletionNet()
MODULES = [net]
opt = torch.optim.Adam(net.parameters(), lr=4e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
watch(*MODULES)

for epoch in range(3):
    for raw, lab in loader:
        with torch.autocast("cpu", dtype=torch.float16):
            depth, seg, hit = net(raw)
        target = torch.where(hit, raw, torch.zeros_like(raw))
        err = torch.where(hit, (depth.float() - target).abs(), torch.zeros_like(target))
        loss = err.sum() / hit.sum() + F.cross_entropy(seg.float(), lab)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        total_norm = nn.utils.clip_grad_norm_(net.parameters(), 10.0)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
    with torch.no_grad():
        d, s, hit = net(sparse)
        print(f"epoch {epoch} loss {loss.item():.3f} gap error {(d - full).abs()[~hit].mean():.3f} iou-ish {(s.argmax(1) == label).float().mean():.3f}")
