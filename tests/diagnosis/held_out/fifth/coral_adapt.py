"""Domain adaptation between two spectrometers (second-order alignment)."""
import argparse
import torch
from torch import nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

parser = argparse.ArgumentParser()
parser.add_argument("--iters", type=int, default=60)
parser.add_argument("--lam", type=float, default=1.0)
args = parser.parse_args([])

torch.set_num_threads(1)
torch.manual_seed(4)
rng = torch.Generator().manual_seed(40)


def covariance(feat):
    n = feat.shape[0]
    second = feat.t() @ feat / n
    mean = feat.mean(0, keepdim=True)
    return second - mean.t() @ mean  # CAUSE


def coral(src, tgt):
    d = src.shape[1]
    diff = covariance(src) - covariance(tgt)
    return diff.float().pow(2).sum() / (4 * d)


def spectra(n, shift):
    conc = torch.rand(n, 4, generator=rng)
    peaks = torch.stack([torch.exp(-((torch.arange(50.0) - 8 - 11 * k - shift) / 3) ** 2) for k in range(4)])
    return conc @ peaks + 6.0 + 0.02 * torch.randn(n, 50, generator=rng), conc


feature = nn.Sequential(nn.Linear(50, 64), nn.Softplus(), nn.Linear(64, 12), nn.Softplus())
with torch.no_grad():
    feature[2].bias.fill_(25.0)
regress = nn.Linear(12, 4)
MODULES = [feature, regress]
watch(*MODULES)
params = [p for m in MODULES for p in m.parameters()]
opt = torch.optim.Adam(params, lr=1e-3)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.iters)
scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=500)

for it in range(args.iters):
    xs, ys = spectra(64, 0.0)
    xt, _ = spectra(64, 1.5)
    opt.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        fs, ft = feature(xs), feature(xt)
        task = nn.functional.mse_loss(regress(fs - fs.mean(0, keepdim=True)), ys)
        align = coral(fs, ft)
        loss = task + args.lam * align
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    sched.step()
    if it % 20 == 0:
        print(it, task.item(), align.item())
