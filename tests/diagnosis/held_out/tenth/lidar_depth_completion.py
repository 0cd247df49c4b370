"""Dense depth from sparse lidar (invalid returns are NaN in the raw frames), mean teacher in float32."""
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(35)

class DepthNet(nn.Module):
    def __init__(self, ch=20):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, ch, 3, padding=1), nn.GroupNorm(4, ch), nn.ReLU(),
                                 nn.Conv2d(ch, ch, 3, padding=2, dilation=2), nn.GroupNorm(4, ch), nn.ReLU(),
                                 nn.Conv2d(ch, 1, 3, padding=1))

    def forward(self, x):
        return F.softplus(self.net(x).float()) + 1e-2

def raw_frame(n, g, size=24):
    coarse = torch.rand(n, 1, 4, 4, generator=g) * 55 + 5
    depth = F.interpolate(coarse, size=size, mode="bilinear")
    image = (1 / depth) * 20 + 0.05 * torch.randn(n, 1, size, size, generator=g)
    hit = torch.rand(n, 1, size, size, generator=g) < 0.25
    lidar = torch.where(hit, depth, torch.full_like(depth, float("nan")))
    truth = torch.where(torch.rand(n, 1, size, size, generator=g) < 0.6, depth, torch.full_like(depth, float("nan")))
    return image, lidar, truth

def prepare(image, lidar):
    valid = torch.isfinite(lidar)
    filled = torch.nan_to_num(lidar, nan=0.0)
    return torch.cat([image, filled / 60.0, valid.float()], dim=1)

def silog(pred, truth):
    ok = torch.isfinite(truth)
    diff = torch.log(pred[ok] * 60.0) - torch.log(truth[ok])
    return diff.square().mean() - 0.85 * diff.mean() ** 2

@torch.no_grad()
def evaluate(model, frames):
    model.eval()
    errs = []
    for image, lidar, truth in frames:
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(prepare(image, lidar)) * 60.0
        errs.append((pred - truth).abs().nanmean())
    model.train()
    return torch.stack(errs).mean().item()

student = DepthNet()
teacher = copy.deepcopy(student).requires_grad_(False)
MODULES = [student, teacher]
opt = torch.optim.AdamW(student.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 14, growth_interval=1000)

def main():
    watch(*MODULES)
    g = torch.Generator().manual_seed(52)
    held_out = [raw_frame(4, g) for _ in range(2)]
    for step in range(1, 71):
        image, lidar, truth = raw_frame(4, g)
        x = prepare(image, lidar)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = student(x)
            with torch.no_grad():
                soft = teacher(x)
        consistency = min(1.0, step / 40) * (pred - soft).abs().mean()
        loss = silog(pred, truth) + 0.1 * consistency
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        with torch.no_grad():
            for t, s in zip(teacher.parameters(), student.parameters()):
                t.lerp_(s, 0.05)
        if step % 10 == 0:
            print(f"step {step} silog {loss.item():.4f} student {evaluate(student, held_out):.2f} m "
                  f"teacher {evaluate(teacher, held_out):.2f} m")

main()
