# link prediction for a synthetic taxonomy in the Lorentz model of hyperbolic space
import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class TangentEncoder(nn.Module):
    def __init__(self, n_nodes, dim=16, hidden=64):
        super().__init__()
        self.table = nn.Embedding(n_nodes, 32)
        self.fc1 = nn.Linear(32, hidden)
        self.fc2 = nn.Linear(hidden, dim)

    def forward(self, ids):
        return self.fc2(F.gelu(self.fc1(self.table(ids))))


def expmap0(v):
    r = v.float().pow(2).sum(-1, keepdim=True).clamp_min(1e-6).sqrt().to(v.dtype)
    return torch.cat([torch.cosh(r), torch.sinh(r) * v / r], dim=-1)  # CAUSE


def lorentz_dist(a, b):
    inner = a[..., :1] * b[..., :1] - (a[..., 1:] * b[..., 1:]).sum(-1, keepdim=True)
    return torch.acosh(inner.float().clamp_min(1 + 1e-4)).squeeze(-1)


class Trainer:
    def __init__(self, depth=7, branching=2):
        self.g = torch.Generator().manual_seed(3)
        self.n = branching ** (depth + 1) - 1
        self.parent = torch.tensor([0] + [(i - 1) // branching for i in range(1, self.n)])
        self.net = TangentEncoder(self.n)
        self.opt = torch.optim.SGD([
            {"params": self.net.table.parameters(), "lr": 1.0},
            {"params": list(self.net.fc1.parameters()) + list(self.net.fc2.parameters()), "lr": 0.15},
        ], momentum=0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        self.skipped = 0

    def batch(self, size=96, negatives=8):
        child = torch.randint(1, self.n, (size,), generator=self.g)
        neg = torch.randint(0, self.n, (size, negatives), generator=self.g)
        return child, torch.cat([self.parent[child][:, None], neg], 1)

    def step(self):
        child, cand = self.batch()
        with torch.autocast("cpu", dtype=torch.float16):
            q = expmap0(self.net(child))
            k = expmap0(self.net(cand))
            d = lorentz_dist(q[:, None].float(), k.float())
        logits = (2.0 - d) / 1.5
        target = torch.zeros(len(child), dtype=torch.long)
        loss = F.cross_entropy(logits, target)
        self.opt.zero_grad()
        self.scaler.scale(loss).backward()
        before = self.scaler.get_scale()
        self.scaler.step(self.opt)
        self.scaler.update()
        self.skipped += self.scaler.get_scale() < before
        return loss.item()


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(3)
    tr = Trainer()
    MODULES = [tr.net]
    watch(*MODULES)
    for it in range(1, 101):
        value = tr.step()
        if it % 10 == 0:
            print(f"{it:4d} loss {value:.4f} skipped {tr.skipped}")
