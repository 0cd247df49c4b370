import torch
import torch.nn as nn
import torch.nn.functional as F
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)


class MultiTaskLoss(nn.Module):
    """homoscedastic uncertainty weighting, Kendall et al."""

    def __init__(self, n):
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(n))

    def forward(self, losses):
        losses = torch.stack([l.float() for l in losses])
        return (torch.exp(-self.log_vars) * losses + 0.5 * self.log_vars).sum()


class TabNetLite(nn.Module):
    def __init__(self, n_in, width=40):
        super().__init__()
        self.attentive = nn.Linear(n_in, n_in)
        self.shared = nn.Sequential(nn.Linear(n_in, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.churn, self.spend, self.plan = nn.Linear(width, 1), nn.Linear(width, 1), nn.Linear(width, 5)

    def forward(self, x):
        mask = torch.softmax(self.attentive(x), -1) * x.shape[1]
        h = self.shared(mask * x)
        return self.churn(h).squeeze(1), self.spend(h).squeeze(1), self.plan(h)


def customers(n, gen):
    x = torch.randn(n, 14, generator=gen)
    w = torch.randn(14, 7, generator=gen)
    z = x @ w
    return x, (z[:, 0] > 0.3).float(), z[:, 1] / 2 + 0.1 * torch.randn(n, generator=gen), z[:, 2:].argmax(1)


def main():
    gen = torch.Generator().manual_seed(404)
    x, churn, spend, plan = customers(1500, gen)
    watch(*MODULES)
    net_opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=1e-4)
    weight_opt = torch.optim.SGD(criterion.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2048.0, growth_interval=400)
    for step in range(1, 61):
        i = torch.randint(0, len(x), (64,), generator=gen)
        with torch.autocast("cpu", dtype=torch.float16):
            c, s, p = net(x[i])
            parts = [F.binary_cross_entropy_with_logits(c, churn[i]), F.mse_loss(s, spend[i]), F.cross_entropy(p, plan[i])]
            loss = criterion(parts)
        net_opt.zero_grad(set_to_none=True)
        weight_opt.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(net_opt)
        if step > 20:                       # keep equal weights until the heads have settled
            weight_opt.step()  # CAUSE
        scaler.update()
        if step % 8 == 0:
            print(step, "%.4f" % loss.item(), [round(float(v), 3) for v in criterion.log_vars], [round(float(q), 3) for q in parts])


torch.manual_seed(40)
net, criterion = TabNetLite(14), MultiTaskLoss(3)
MODULES = [net, criterion]
main()
