"""Barycentre-style alignment: an encoder is trained so that soft-DTW between two takes of the same sign is small."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(14)
g = torch.Generator().manual_seed(41)
LEN, JOINTS, SIGNS = 9, 10, 6
BIG = float("inf")


def softmin3(a, b, c, gamma):
    z = torch.stack([a, b, c], -1)
    return -gamma * torch.logsumexp(-z / gamma, -1)


def soft_dtw(cost, gamma=0.2, band=4):
    n, rows, cols = cost.shape
    edge = cost.new_full((n,), BIG)
    above = [cost.new_zeros(n)] + [edge] * cols
    for i in range(1, rows + 1):
        row = [edge]
        for j in range(1, cols + 1):
            if abs(i - j) > band:
                row.append(edge)
                continue
            row.append(cost[:, i - 1, j - 1] + softmin3(above[j - 1], above[j], row[j - 1], gamma))
        above = row
    return above[cols] / (rows + cols)


class HandEncoder(nn.Module):
    def __init__(self, out=16):
        super().__init__()
        self.a = nn.Conv1d(2 * JOINTS, 48, 3, padding=1)
        self.b = nn.Conv1d(48, out, 3, padding=1)

    def forward(self, x):
        h = torch.nn.functional.silu(self.a(x.transpose(1, 2)))
        return torch.tanh(self.b(h)).transpose(1, 2)


def takes(n=16):
    y = torch.randint(0, SIGNS, (n,), generator=g)
    base = PROTO[y]

    def warp():
        speed = 0.7 + 0.6 * torch.rand(n, LEN, generator=g)
        pos = speed.cumsum(1)
        pos = (pos - pos[:, :1]) / (pos[:, -1:] - pos[:, :1]) * (LEN - 1)
        idx = pos.round().long()
        v = base.gather(1, idx.unsqueeze(-1).expand(-1, -1, 2 * JOINTS))
        return v + 0.2 * torch.randn(v.shape, generator=g)

    return warp(), warp(), y


PROTO = torch.randn(SIGNS, LEN, 2 * JOINTS, generator=g)
enc = HandEncoder()
MODULES = [enc]
opt = torch.optim.Adam(enc.parameters(), lr=2e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=25)
watch(*MODULES)
for step in range(60):
    x1, x2, y = takes()
    with torch.autocast("cpu", dtype=torch.float16):
        e1, e2 = enc(x1), enc(x2)
    roll = y.roll(1) != y
    e1, e2 = e1.float(), e2.float()
    pos = soft_dtw((e1.unsqueeze(2) - e2.unsqueeze(1)).square().sum(-1))
    neg = soft_dtw((e1.unsqueeze(2) - e2.roll(1, 0).unsqueeze(1)).square().sum(-1))
    gap = torch.where(roll, torch.relu(2.0 + pos - neg), pos)
    loss = gap.mean()
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if step % 15 == 0:
        print(f"{step} loss {loss.item():.4f} pos {pos.mean().item():.4f} neg {neg.mean().item():.4f} scale {scaler.get_scale():.0f}")
