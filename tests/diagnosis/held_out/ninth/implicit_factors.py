"""Implicit-feedback matrix factorisation with a side network, linear-scaling rule for the learning rate."""
import argparse
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


class TwoTower(nn.Module):
    def __init__(self, users, items, dim, item_feat):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.side = nn.Linear(item_feat.shape[1], dim, bias=False)
        self.register_buffer("item_feat", item_feat)
        self.proj = nn.Linear(dim, dim)
        nn.init.normal_(self.user.weight, std=0.3)
        nn.init.normal_(self.item.weight, std=0.3)

    def forward(self, u):
        p = self.proj(self.user(u))
        q = self.item.weight + self.side(self.item_feat)
        return p @ q.t()


def weighted_squares(score, clicks, alpha):
    confidence = 1 + alpha * clicks
    return (confidence * (score - clicks.clamp(max=1)) ** 2).sum(1).mean()


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--base-lr", type=float, default=2e-4)
    ap.add_argument("--workers", type=int, default=64)
    ap.add_argument("--warmup", type=int, default=25)
    return ap.parse_args([])


torch.set_num_threads(1)
torch.manual_seed(12)
args = parse()
g = torch.Generator().manual_seed(40)
taste, topic = torch.randn(300, 6, generator=g), torch.randn(120, 6, generator=g)
clicks = torch.poisson(torch.exp(0.6 * taste @ topic.t() - 2.0).clamp(max=8), generator=g)

model = TwoTower(300, 120, 32, torch.cat([topic, torch.randn(120, 10, generator=g)], 1))
MODULES = [model]
opt = torch.optim.SGD(model.parameters(), lr=args.base_lr * args.workers, momentum=0.9)  # CAUSE
warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: min(1.0, (k + 1) / args.warmup))
scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
watch(*MODULES)

for step in range(1, 91):
    u = torch.randint(0, 300, (32,), generator=g)
    with torch.autocast("cpu", dtype=torch.float16):
        score = model(u)
        loss = weighted_squares(score.float(), clicks[u], alpha=2.0)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    warm.step()
    if step % 10 == 0:
        print(step, f"lr {warm.get_last_lr()[0]:.4f} loss {loss.item():.3f} scale {scaler.get_scale():g}")
