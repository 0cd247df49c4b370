"""Learned soft matching of two scans; the rigid motion comes from an orthogonal Procrustes solve inside the graph."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(77)
g = torch.Generator().manual_seed(770)

class PointFeatures(nn.Module):
    def __init__(self, dim=48):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(4, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.fuse = nn.Sequential(nn.Linear(2 * dim, dim), nn.ReLU(), nn.Linear(dim, 24))

    def forward(self, pts):
        c = pts - pts.mean(1, keepdim=True)
        r = torch.cat([c.norm(dim=-1, keepdim=True), torch.cdist(c, c).sort(-1).values[..., 1:4]], -1)
        h = self.local(r)
        return self.fuse(torch.cat([h, h.amax(1, keepdim=True).expand_as(h)], -1))

class Registration(nn.Module):
    def __init__(self):
        super().__init__()
        self.feat = PointFeatures()
        self.temp = nn.Parameter(torch.tensor(1.0))

    def match(self, src, dst):
        fs, fd = self.feat(src), self.feat(dst)
        return torch.softmax((fs @ fd.transpose(1, 2)).float() * self.temp / 24 ** 0.5, -1)

    def forward(self, src, dst):
        w = self.match(src, dst)
        with torch.autocast("cpu", enabled=False):
            corr = w @ dst
            a = src - src.mean(1, keepdim=True)
            b = corr - corr.mean(1, keepdim=True)
            return self.procrustes(a.transpose(1, 2) @ b), w

    @staticmethod
    def procrustes(h):
        u, s, vh = torch.linalg.svd(h)  # CAUSE
        v = vh.transpose(1, 2)
        sign = torch.det((v @ u.transpose(1, 2)).detach()).sign()
        fix = torch.stack([torch.ones_like(sign), torch.ones_like(sign), sign], -1)
        return v @ torch.diag_embed(fix) @ u.transpose(1, 2)

def random_rotation(n):
    q, r = torch.linalg.qr(torch.randn(n, 3, 3, generator=g))
    q = q * torch.diagonal(r, dim1=1, dim2=2).sign().unsqueeze(1)
    q[:, :, 0] *= torch.det(q).sign().unsqueeze(-1)
    return q

def scan_pairs(it, n=8, m=20):
    src = torch.randn(n, m, 3, generator=g) * torch.tensor([1.0, 0.7, 0.4])
    rot = random_rotation(n)
    perm = torch.randperm(m, generator=g)
    if it in (18, 33, 47):
        src[-1] = src[-1, :1]                        # sensor repeated one return for the whole sweep
    dst = (src @ rot.transpose(1, 2))[:, perm] + 0.01
    return src, dst, rot, torch.argsort(perm)

net = Registration()
MODULES = [net]
opt = torch.optim.Adam(net.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=500)
watch(*MODULES)
for it in range(1, 61):
    src, dst, rot, inv = scan_pairs(it)
    with torch.autocast("cpu", dtype=torch.float16):
        est, w = net(src, dst)
    hit = w.gather(-1, inv[None, :, None].expand(w.size(0), -1, 1)).clamp_min(1e-6).log().mean()
    loss = (est - rot).square().sum((1, 2)).mean() * 0.1 - hit
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    if it % 15 == 0:
        err = (est - rot).flatten(1).norm(dim=1).median()
        print(f"{it:3d} loss {loss.item():.3f} median chordal error {err:.3f} scale {scaler.get_scale():.0f}")
