import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(17)


class PolarEncoding(nn.Module):
    """distance, azimuth and elevation of learned key offsets, as input of the position MLP"""

    def __init__(self, dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(4, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, delta):
        delta = delta.float()
        dist = torch.linalg.vector_norm(delta, dim=-1)
        phi = torch.atan2(delta[..., 1], delta[..., 0])
        elevation = torch.asin(delta[..., 2] / dist)  # CAUSE
        return self.mlp(torch.stack([dist, phi.cos(), phi.sin(), elevation], -1))


class VectorAttention(nn.Module):
    def __init__(self, dim, k):
        super().__init__()
        self.k = k
        self.qkv = nn.Linear(dim, 3 * dim)
        self.shift = nn.Linear(dim, 3)
        nn.init.zeros_(self.shift.weight)
        nn.init.zeros_(self.shift.bias)
        self.pos = PolarEncoding(dim)
        self.attn = nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim))

    def forward(self, xyz, feat):
        q, key, val = self.qkv(feat).chunk(3, -1)
        with torch.no_grad():
            idx = torch.cdist(xyz, xyz).topk(self.k + 1, dim=-1, largest=False).indices[..., 1:]
        pick = lambda t: torch.stack([t[b][idx[b]] for b in range(len(t))])
        moved = xyz + 0.1 * torch.tanh(self.shift(feat))
        pe = self.pos(pick(xyz) - moved[:, :, None])
        w = F.softmax(self.attn(q[:, :, None] - pick(key) + pe), dim=2)
        return feat + (w * (pick(val) + pe)).sum(2)


class PointNet(nn.Module):
    def __init__(self, dim=32, classes=4):
        super().__init__()
        self.stem = nn.Linear(3, dim)
        self.block = VectorAttention(dim, 6)
        self.cls = nn.Linear(dim, classes)

    def forward(self, xyz):
        f = self.block(xyz, torch.relu(self.stem(xyz)))
        return self.cls(f.amax(1))


def sample_shapes(gen, batch, n=40):
    label = torch.randint(0, 4, (batch,), generator=gen)
    p = torch.randn(batch, n, 3, generator=gen)
    p = p / p.norm(dim=-1, keepdim=True)
    s = torch.tensor([[1, 1, 1], [1, 1, 0.3], [1, 0.3, 1], [0.4, 0.4, 1.5]])[label]
    return p * s[:, None], label


def jitter_pillars(xyz, gen):
    """mimic a scanner that returns several heights for the same column"""
    xyz = xyz.clone()
    xyz[:, ::8, :2] = xyz[:, 1::8, :2]
    xyz[:, ::8, 2] = xyz[:, 1::8, 2] + 0.02 + 0.05 * torch.rand(xyz.shape[0], 5, generator=gen)
    return xyz


gen = torch.Generator().manual_seed(17)
net = PointNet()
MODULES = [net]
watch(*MODULES)
pos_params = list(net.block.shift.parameters())
ids = {id(p) for p in pos_params}
opt = torch.optim.AdamW([
    {"params": [p for p in net.parameters() if id(p) not in ids]},
    {"params": pos_params, "lr": 0.0},
], lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
for it in range(60):
    xyz, label = sample_shapes(gen, 12)
    if it >= 25 and it % 3 == 1:
        xyz = jitter_pillars(xyz, gen)
    with torch.autocast("cpu", dtype=torch.float16):
        logits = net(xyz)
        loss = F.cross_entropy(logits.float(), label, label_smoothing=0.05)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it == 40:
        opt.param_groups[1]["lr"] = 3e-3
    if it % 10 == 9:
        print(it + 1, round(loss.item(), 4), scaler.get_scale())
