import math
import torch
import torch.nn as nn
try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.manual_seed(2)
torch.set_num_threads(1)


class Matern32(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_ell = nn.Parameter(torch.zeros(()))
        self.log_out = nn.Parameter(torch.zeros(()))

    def forward(self, a, b):
        d2 = (a[:, None, :] - b[None, :, :]).pow(2).sum(-1)
        r = d2.sqrt() * torch.exp(-self.log_ell) * math.sqrt(3.0)  # CAUSE
        return torch.exp(self.log_out) * (1 + r) * torch.exp(-r)


class DeepKernelRegressor(nn.Module):
    def __init__(self, d_in, d_feat=3):
        super().__init__()
        self.feat = nn.Sequential(nn.Linear(d_in, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, d_feat))
        self.pretrain_head = nn.Linear(d_feat, 1)
        self.kernel = Matern32()
        self.log_noise = nn.Parameter(torch.tensor(-1.5))

    def linear(self, x):
        return self.pretrain_head(self.feat(x)).squeeze(-1)

    def marginal_nll(self, x, y):
        z = self.feat(x)
        K = self.kernel(z, z).float()
        K = K + (self.log_noise.exp() + 1e-3) * torch.eye(len(x))
        # plain CG instead of Cholesky: no factorisation needed for 40 points
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            sol, res = torch.zeros_like(y), y.clone()
            p, rs = res.clone(), res @ res
            for _ in range(40):
                Kp = (K * p).sum(1)
                alpha = rs / (p @ Kp + 1e-12)
                sol, res = sol + alpha * p, res - alpha * Kp
                new = res @ res
                p, rs = res + new / (rs + 1e-12) * p, new
        fit = 2 * (y * sol).sum() - (sol[:, None] * K * sol).sum()
        return 0.5 * (fit + K.diagonal().log().sum()) / len(x)


gen = torch.Generator().manual_seed(22)
X = torch.randn(800, 6, generator=gen)
Y = torch.sin(2 * X[:, 0]) + 0.5 * X[:, 1] * X[:, 2] + 0.1 * torch.randn(800, generator=gen)

model = DeepKernelRegressor(6)
MODULES = [model]
watch(*MODULES)
optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=200)
PRETRAIN = 25

for step in range(75):
    idx = torch.randperm(800, generator=gen)[:40]
    with torch.autocast("cpu", dtype=torch.float16):
        if step < PRETRAIN:
            loss = nn.functional.mse_loss(model.linear(X[idx]), Y[idx])
        else:
            loss = model.marginal_nll(X[idx], Y[idx])
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 8 == 0:
        print(step, "pre" if step < PRETRAIN else "gp", "%.4f" % loss.item(), "noise %.3f" % model.log_noise.exp().item())
