"""Multi-assay activity prediction: most labels are missing, some are only bounds ('> 10 uM')."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(70)
BITS, ASSAYS = 96, 8


def table(n, generator):
    """value: NaN where not measured; upper: +inf where no bound was reported."""
    bits = (torch.rand(n, BITS, generator=generator) < 0.15).float()
    weights = torch.randn(BITS, ASSAYS, generator=torch.Generator().manual_seed(1)) / 3
    activity = bits @ weights + 0.1 * torch.randn(n, ASSAYS, generator=generator)
    measured = torch.rand(n, ASSAYS, generator=generator) < 0.25
    censored = measured & (activity > 1.2)
    value = torch.where(measured & ~censored, activity, torch.nan)
    lower = torch.where(censored, torch.tensor(1.2), torch.tensor(-torch.inf))
    return bits, value, lower


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(BITS, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, width), nn.ReLU())
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(ASSAYS))

    def forward(self, bits):
        h = self.shared(bits)
        return torch.cat([head(h) for head in self.heads], -1)


def censored_loss(pred, value, lower):
    known = value.isfinite()
    exact = (pred[known] - value[known]).square().sum()
    bounded = lower.isfinite()
    below = F.relu(lower[bounded] - pred[bounded]).square().sum()
    count = known.sum() + bounded.sum()
    return (exact + below) / count.clamp_min(1)


def per_assay_rmse(pred, value):
    error = torch.where(value.isnan(), torch.nan, pred - value)
    return error.square().nanmean(0).sqrt()


model = Net()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10, growth_interval=30)
generator = torch.Generator().manual_seed(8)

for step in range(100):
    bits, value, lower = table(3 if step % 25 == 24 else 48, generator)
    with torch.autocast("cpu", dtype=torch.float16):
        pred = model(bits)
    loss = censored_loss(pred.float(), value, lower)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 25 >= 23:
        rmse = per_assay_rmse(pred.detach().float(), value)
        print(f"{step:3d} loss {loss.item():.4f} rmse", " ".join("-" if r != r else f"{r:.2f}" for r in rmse.tolist()))
