import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(71)


class FeatureTokenizer(nn.Module):
    def __init__(self, n_num, cards, d):
        super().__init__()
        self.w = nn.Parameter(torch.randn(n_num, d) * 0.3)
        self.b = nn.Parameter(torch.zeros(n_num, d))
        self.cat = nn.ModuleList(nn.Embedding(c, d) for c in cards)
        self.cls = nn.Parameter(torch.zeros(1, 1, d))

    def forward(self, num, cat):
        tok = [num.unsqueeze(-1) * self.w + self.b]
        tok += [e(cat[:, i]).unsqueeze(1) for i, e in enumerate(self.cat)]
        return torch.cat([self.cls.expand(len(num), -1, -1)] + tok, 1)


class TabNet(nn.Module):
    def __init__(self, n_num=6, cards=(4, 7), d=24):
        super().__init__()
        self.tok = FeatureTokenizer(n_num, cards, d)
        self.attn = nn.MultiheadAttention(d, 3, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 48), nn.ReLU(), nn.Linear(48, d))
        self.head = nn.Linear(d, 1)

    def forward(self, num, cat):
        x = self.tok(num, cat)
        x = x + self.attn(x, x, x, need_weights=False)[0]
        x = x + self.ff(x)
        return self.head(x[:, 0]).squeeze(-1)


def table(n, seed):
    g = torch.Generator().manual_seed(seed)
    num = torch.randn(n, 6, generator=g)
    cat = torch.stack([torch.randint(0, 4, (n,), generator=g), torch.randint(0, 7, (n,), generator=g)], 1)
    y = num[:, 0] * (cat[:, 0] - 1.5) + num[:, 1] + 0.3 * cat[:, 1]
    return num, cat, y


def main():
    num, cat, y = table(2048, 7)
    opt = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=2.0, total_steps=90, pct_start=0.4)  # CAUSE
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    watch(*MODULES)
    for step in range(90):
        i = (step * 64) % 2048
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(num[i:i + 64], cat[i:i + 64])
        loss = (out.float() - y[i:i + 64]).pow(2).mean()
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)  # CAUSE
        scaler.update()
        sched.step()
        if step % 10 == 9:
            print(step, f"{loss.item():.4g}", f"lr {sched.get_last_lr()[0]:.3f}")


model = TabNet()
MODULES = [model]
main()
