import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(101)


class Refiner(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.down = nn.Conv2d(1, c, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(3, c)
        self.mid = nn.Conv2d(c, c, 3, padding=1)
        self.up = nn.ConvTranspose2d(c, c, 2, stride=2)
        self.out = nn.Conv2d(c, 1, 3, padding=1)
        self.drop = nn.Dropout2d(0.1)

    def forward(self, x):
        h = F.silu(self.norm(self.down(x)))
        h = self.drop(h + F.silu(self.mid(h)))
        return x + self.out(F.silu(self.up(h)))


def disks(g, n=12, s=20):
    yy, xx = torch.meshgrid(torch.arange(s), torch.arange(s), indexing="ij")
    c = 5 + 10 * torch.rand(2, n, 1, 1, generator=g)
    r = 2 + 4 * torch.rand(n, 1, 1, generator=g)
    clean = (((xx - c[0]) ** 2 + (yy - c[1]) ** 2).sqrt() < r).float().unsqueeze(1)
    return clean, F.avg_pool2d(clean, 3, 1, 1) + 0.2 * torch.randn(n, 1, s, s, generator=g)


def evaluate(model, g_seed=2024):
    model.eval()
    clean, noisy = disks(torch.Generator().manual_seed(g_seed), n=32)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        psnr = -10 * torch.log10((model(noisy).float() - clean).square().mean())
    model.train()
    return psnr.item()


model = Refiner()
MODULES = [model]
watch(*MODULES)
gen = torch.Generator().manual_seed(77)
opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=8e-3, total_steps=90)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 16, growth_interval=7)
n_skipped = 0
for step in range(90):
    clean, noisy = disks(gen)
    opt.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.float16):
        restored = model(noisy)
        edges = (restored[..., 1:] - restored[..., :-1]).float() - (clean[..., 1:] - clean[..., :-1])
        loss = F.mse_loss(restored, clean) + 0.3 * edges.abs().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    before = scaler.get_scale()
    scaler.step(opt)
    scaler.update()
    if scaler.get_scale() < before:
        n_skipped += 1
    else:
        sched.step()
    if step % 15 == 14:
        print(f"step {step + 1} loss {loss.item():.4f} psnr {evaluate(model):.2f} scale {scaler.get_scale():g} skipped {n_skipped}")
