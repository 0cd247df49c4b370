import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(42)


class OrderedHead(nn.Module):
    """proportional odds: K ordered grades share one score, K-1 increasing cut points"""

    def __init__(self, d, k):
        super().__init__()
        self.score = nn.Linear(d, 1)
        self.first = nn.Parameter(torch.tensor([-6.0]))
        self.gaps = nn.Parameter(torch.full((k - 2,), 4.0))

    def forward(self, h):
        s = self.score(h)
        cuts = torch.cat([self.first, self.first + torch.cumsum(nn.functional.softplus(self.gaps), 0)])
        cdf = torch.sigmoid(cuts.to(s.dtype) - s)
        edge0, edge1 = torch.zeros_like(s), torch.ones_like(s)
        cdf = torch.cat([edge0, cdf, edge1], -1)
        return cdf[:, 1:] - cdf[:, :-1]  # CAUSE


def grade_nll(p, y):
    return -p.gather(1, y.unsqueeze(1)).float().log().mean()


class Net(nn.Module):
    def __init__(self, d_in=10, k=5):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(d_in, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU())
        self.head = OrderedHead(48, k)

    def forward(self, x):
        return self.head(self.trunk(x))


def patients(g, n, spread):
    x = torch.randn(n, 10, generator=g) * spread
    latent = 1.4 * x[:, 0] - x[:, 1] + 0.6 * x[:, 2]
    y = torch.bucketize(latent + 0.05 * torch.randn(n, generator=g), torch.tensor([-3.0, -1.0, 1.0, 3.0]))
    swap = torch.rand(n, generator=g) < 0.02          # reading errors of the graders
    return x, torch.where(swap, 4 - y, y)


class Trainer:
    def __init__(self, net, epochs=4, steps=16):
        self.net, self.epochs, self.steps = net, epochs, steps
        self.opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, epochs * steps)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
        self.g = torch.Generator().manual_seed(9)

    def fit(self):
        for ep in range(self.epochs):
            total = 0.0
            for _ in range(self.steps):
                x, y = patients(self.g, 64, spread=1.0 if ep < 2 else 1.15)
                with torch.autocast("cpu", dtype=torch.float16):
                    p = self.net(x)
                loss = grade_nll(p, y)
                self.opt.zero_grad(set_to_none=True)
                self.scaler.scale(loss).backward()
                self.scaler.step(self.opt)
                self.scaler.update()
                self.sched.step()
                total += loss.item()
            print(f"epoch {ep} nll {total / self.steps:.4f}")


net = Net()
MODULES = [net]
watch(*MODULES)
Trainer(net).fit()
