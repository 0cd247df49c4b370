import torch
from torch import nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...
torch.set_num_threads(1)


class SwishFn(torch.autograd.Function):
    """keeps only x, recomputes the gate in backward (saves one activation per layer)"""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        ex = x.exp()  # CAUSE
        gate = ex / (1 + ex)
        return grad * gate * (1 + x * (1 - gate))


class MemSwish(nn.Module):
    def forward(self, x):
        return SwishFn.apply(x)


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.act = MemSwish()

    def forward(self, x):
        return x + self.b(self.act(self.a(x)))


class TabularResNet(nn.Module):
    def __init__(self, n_num, cards, width=48, depth=3):
        super().__init__()
        self.emb = nn.ModuleList(nn.Embedding(c, 6) for c in cards)
        self.stem = nn.Linear(n_num + 6 * len(cards), width)
        self.body = nn.Sequential(*[ResBlock(width) for _ in range(depth)])
        self.head = nn.Linear(width, 1)

    def forward(self, xn, xc):
        e = [m(xc[:, i]) for i, m in enumerate(self.emb)]
        return self.head(self.body(self.stem(torch.cat([xn] + e, 1)))).squeeze(1)


def make_table(n, gen):
    xn = torch.randn(n, 8, generator=gen)
    xn[:, 0] = xn[:, 0].mul(0.9).exp()          # incomes, long right tail
    xc = torch.stack([torch.randint(0, c, (n,), generator=gen) for c in (7, 12)], 1)
    y = 0.8 * xn[:, 0] + xn[:, 1] * (xc[:, 0] > 3) - 0.3 * xc[:, 1] + 0.1 * torch.randn(n, generator=gen)
    xn[700, 0] = 95.0                             # one household in ten thousand
    return xn, xc, y


torch.manual_seed(11)
gen = torch.Generator().manual_seed(12)
xn, xc, y = make_table(1024, gen)
y = (y - y.mean()) / y.std()
model = TabularResNet(8, (7, 12))
MODULES = [model]


def fit(epochs=4, bs=48):
    watch(*MODULES)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, weight_decay=1e-5)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=1000)
    for epoch in range(epochs):
        perm, tot = torch.randperm(len(y), generator=gen), 0.0
        for b, idx in enumerate(perm.split(bs)):
            with torch.autocast(device_type="cpu", dtype=torch.float16):
                pred = model(xn[idx], xc[idx])
                loss = nn.functional.smooth_l1_loss(pred, y[idx])
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
            tot += loss.item()
        print(f"epoch {epoch}: {tot / (b + 1):.4f}  scale {scaler.get_scale():.0f}")


if __name__ == "__main__":
    fit()
