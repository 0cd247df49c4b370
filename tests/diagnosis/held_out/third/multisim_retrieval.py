import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(6)


class MultiSimilarityLoss(nn.Module):
    def __init__(self, alpha=2.0, beta=50.0, base=0.5, margin=0.1):
        super().__init__()
        self.alpha, self.beta, self.base, self.margin = alpha, beta, base, margin

    def forward(self, emb, labels):
        emb = F.normalize(emb, dim=-1)
        sim = emb @ emb.t()
        same = labels[:, None] == labels[None, :]
        pos_mask = same & ~torch.eye(len(labels), dtype=torch.bool)
        neg_mask = ~same
        hardest_pos = sim.masked_fill(~pos_mask, 2.0).amin(1, keepdim=True)
        hardest_neg = sim.masked_fill(~neg_mask, -2.0).amax(1, keepdim=True)
        pos_mask = pos_mask & (sim - self.margin < hardest_neg)
        neg_mask = neg_mask & (sim + self.margin > hardest_pos)
        pos = torch.exp(-self.alpha * (sim - self.base)) * pos_mask
        neg = torch.where(neg_mask, torch.exp(self.beta * (sim - self.base)), 0.0)  # CAUSE
        loss = torch.log1p(pos.sum(1)) / self.alpha + torch.log1p(neg.sum(1)) / self.beta
        return loss.float().mean()


class Embedder(nn.Module):
    def __init__(self, d=24, out=32):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, out))

    def forward(self, x):
        return self.net(x)


def pk_batch(gen, centers, p, k, near_dup):
    ids = torch.randperm(len(centers), generator=gen)[:p]
    y = ids.repeat_interleave(k)
    x = centers[y] + 2.5 * torch.randn(p * k, centers.size(1), generator=gen)
    if near_dup:                      # catalogue has re-listed products under a second id
        x[k] = x[0] + 0.02 * torch.randn(centers.size(1), generator=gen)
    return x, y


gen = torch.Generator().manual_seed(60)
centers = torch.randn(40, 24, generator=gen) * 2
model, criterion = Embedder(), MultiSimilarityLoss()
MODULES = [model, criterion]
watch(*MODULES)
opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
for it in range(1, 61):
    x, y = pk_batch(gen, centers, 8, 4, near_dup=(it % 14 == 0))
    with torch.autocast("cpu", dtype=torch.float16):
        loss = criterion(model(x), y)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 15 == 0:
        print(it, f"{loss.item():.4f}", scaler.get_scale())
