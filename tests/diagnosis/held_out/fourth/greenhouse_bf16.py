"""Forecast of greenhouse humidity from drop-out prone sensors (bf16, no scaler)."""
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(47)
SENSORS, WINDOW = 6, 16


class Forecaster(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.gru = nn.GRU(2 * SENSORS, hidden, batch_first=True)
        self.head = nn.Sequential(nn.Linear(hidden, 32), nn.ReLU(), nn.Linear(32, 1))
        self.spare_head = nn.Linear(hidden, 3)  # for the next campaign, not trained yet

    def forward(self, x, present):
        out, _ = self.gru(torch.cat([x, present], -1))
        return self.head(out[:, -1]).squeeze(-1)


def telemetry(g, n):
    t0 = 50 * torch.rand(n, 1, 1, generator=g)
    t = t0 + torch.arange(WINDOW + 1).view(1, -1, 1)
    phase = torch.arange(SENSORS).view(1, 1, -1) * 0.5
    clean = torch.sin(0.3 * t + phase) + 0.05 * torch.randn(n, WINDOW + 1, SENSORS, generator=g)
    x, target = clean[:, :-1].clone(), clean[:, -1].mean(-1)
    lost = torch.rand(n, WINDOW, SENSORS, generator=g) < 0.15
    x[lost] = float("nan")
    stuck = torch.rand(n, generator=g) < 0.05
    x[stuck, :, 2] = float("inf")  # ADC overflow code of sensor 2
    return x, target


def clean_inputs(x):
    present = torch.isfinite(x)
    return torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0), present.float()


g = torch.Generator().manual_seed(33)
model = Forecaster()
MODULES = [model]
watch(*MODULES)
opt = torch.optim.AdamW([p for n, p in model.named_parameters() if not n.startswith("spare")], lr=5e-3)
empty = 0
for step in range(1, 101):
    raw, target = telemetry(g, 24)
    usable = torch.isfinite(raw).float().mean((1, 2)) > (0.995 if step % 25 == 0 else 0.6)
    if not usable.any():
        empty += 1
        continue
    x, present = clean_inputs(raw[usable])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pred = model(x, present)
    loss = nn.functional.huber_loss(pred.float(), target[usable], delta=0.5)
    opt.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    if step % 20 == 1:
        print(f"step {step} loss {loss.item():.5f} used {int(usable.sum())} empty so far {empty}")
