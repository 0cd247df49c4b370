"""Image classification with a selective scan over four directions; the log shows the gradient norm and its mean."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(252)


class AverageMeter:
    def __init__(self):
        self.val, self.sum, self.count = 0.0, 0.0, 0

    def update(self, val):
        self.val, self.sum, self.count = val, self.sum + val, self.count + 1

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


class NativeScalerWithGradNormCount:
    def __init__(self):
        self._scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=6)

    def __call__(self, loss, optimizer, clip_grad=None, parameters=None):
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(parameters, clip_grad)
        self._scaler.step(optimizer)
        self._scaler.update()
        return norm

    def state_dict(self):
        return self._scaler.state_dict()


class SS2D(nn.Module):
    def __init__(self, dim, state=2):
        super().__init__()
        self.state = state
        self.in_proj, self.x_proj = nn.Linear(dim, dim), nn.Linear(dim, 2 * state + 1)
        self.A_logs, self.Ds = nn.Parameter(torch.zeros(dim, state)), nn.Parameter(torch.ones(dim))
        self.out_norm, self.out_proj = nn.LayerNorm(dim), nn.Linear(dim, dim)

    def scan(self, u):
        dt, b, c = self.x_proj(u).float().split([1, self.state, self.state], -1)
        dt, u = F.softplus(dt), u.float()
        h, ys, a = 0.0, [], -torch.exp(self.A_logs.float())
        for i in range(u.shape[1]):
            h = torch.exp(dt[:, i, :, None] * a) * h + (dt[:, i] * u[:, i]).unsqueeze(-1) * b[:, i, None]
            ys.append((h * c[:, i, None]).sum(-1))
        return torch.stack(ys, 1) + self.Ds * u

    def forward(self, x):
        b, h, w, d = x.shape
        x = F.silu(self.in_proj(x))
        rows, cols = x.reshape(b, h * w, d), x.transpose(1, 2).reshape(b, h * w, d)
        y = self.scan(torch.cat([rows, rows.flip(1), cols, cols.flip(1)]))
        r, rf, c, cf = y.chunk(4)
        cols = (c + cf.flip(1)).view(b, w, h, d).transpose(1, 2).reshape(b, h * w, d)
        return self.out_proj(self.out_norm(r + rf.flip(1) + cols)).view(b, h, w, d)


class VSSM(nn.Module):
    def __init__(self, dim=32, depth=2, classes=5):
        super().__init__()
        self.patch = nn.Conv2d(1, dim, 4, stride=4)
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.blocks = nn.ModuleList(SS2D(dim) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, x):
        x = self.patch(x).permute(0, 2, 3, 1)
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(norm(x))
        return self.head(x.mean((1, 2)))


def batch(gen, n=16):
    y = torch.randint(0, 5, (n,), generator=gen)
    yy, xx = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    angle = y.view(-1, 1, 1) * math.pi / 5
    wave = torch.sin(0.9 * (xx * angle.cos() + yy * angle.sin()) + 6 * torch.rand(n, 1, 1, generator=gen))
    return (wave + 0.4 * torch.randn(n, 16, 16, generator=gen)).unsqueeze(1), y


model = VSSM()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
loss_scaler = NativeScalerWithGradNormCount()
criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
loss_meter, norm_meter = AverageMeter(), AverageMeter()
gen = torch.Generator().manual_seed(8)
for idx in range(70):
    samples, targets = batch(gen)
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = model(samples)
        loss = criterion(outputs, targets)
    optimizer.zero_grad()
    grad_norm = loss_scaler(loss, optimizer, clip_grad=5.0, parameters=model.parameters())
    loss_meter.update(loss.item())
    norm_meter.update(grad_norm.item())
    if idx % 10 == 9:
        print(f"Train: [{idx + 1}/70]\tloss {loss_meter.val:.4f} ({loss_meter.avg:.4f})\t"
              f"grad_norm {norm_meter.val:.4f} ({norm_meter.avg:.4f})\tloss_scale {loss_scaler.state_dict()['scale']:.1f}")
