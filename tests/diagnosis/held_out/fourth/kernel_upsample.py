# Learned interpolation of point features (coarse cloud -> fine cloud), RBF weights
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(8)


class RBFUpsample(nn.Module):
    def __init__(self, in_ch, out_ch):
        super().__init__()
        self.key = nn.Linear(3, 16)
        self.value = nn.Linear(in_ch, out_ch)
        self.gamma = 2.0

    def forward(self, fine_xyz, coarse_xyz, coarse_feat):
        q, k = self.key(fine_xyz), self.key(coarse_xyz)
        sq = q.pow(2).sum(-1, keepdim=True) + k.pow(2).sum(-1).unsqueeze(1) - 2 * q @ k.transpose(1, 2)
        w = torch.exp(-self.gamma * sq.clamp(min=0))  # CAUSE
        w = w / w.sum(dim=-1, keepdim=True)  # CAUSE
        return w @ self.value(coarse_feat)


class PointNetish(nn.Module):
    def __init__(self):
        super().__init__()
        self.lift = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32))
        self.up = RBFUpsample(32, 32)
        self.refine = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, fine_xyz, coarse_xyz, coarse_val):
        f = self.lift(torch.cat([coarse_xyz, coarse_val], dim=-1))
        return self.refine(self.up(fine_xyz, coarse_xyz, f)).squeeze(-1)


def field(p):
    return torch.sin(4.0 * p[..., 0]) + torch.cos(5.0 * p[..., 1] * p[..., 2])


def make_batch(g, b=6, n_coarse=48, n_fine=96, outdoor=False):
    coarse = torch.rand(b, n_coarse, 3, generator=g) * 2 - 1
    fine = torch.rand(b, n_fine, 3, generator=g) * 2 - 1
    if outdoor:  # a few stray returns next to the object
        fine[0, :3, 2] += 3.0 * fine[0, :3, 2].sign()
    return coarse, fine, field(coarse).unsqueeze(-1), field(fine)


class Trainer:
    def __init__(self, model, lr):
        self.model = model
        self.opt = torch.optim.Adam(model.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2000)
        self.history = []

    def fit(self, g, iters):
        for it in range(iters):
            coarse, fine, cv, fv = make_batch(g, outdoor=it >= 35 and it % 5 == 1)
            with torch.autocast("cpu", dtype=torch.float16):
                pred = self.model(fine, coarse, cv)
            loss = nn.functional.mse_loss(pred.float(), fv)
            self.opt.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
            self.history.append((it, loss.item(), self.scaler.get_scale()))
        return self.history


model = PointNetish()
MODULES = [model]
watch(*MODULES)
log = Trainer(model, lr=4e-3).fit(torch.Generator().manual_seed(2), iters=100)
for it, value, sc in log[::10]:
    print(f"{it:03d} mse={value:.4f} scale={sc:g}")
