"""Short-term power forecast for a wind farm from a SCADA export."""
import csv
import io
import math
import random

import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(10)
COLUMNS = ["wind_speed", "wind_dir_sin", "pitch", "power"]
WINDOW, HORIZON, BATCH = 12, 3, 4

def scada_export(rows=1300):
    """What the historian writes: one row per ten minutes."""
    rnd = random.Random(2)
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["time", *COLUMNS])
    v = 8.0
    for k in range(rows):
        v = max(0.0, v + rnd.gauss(0, 0.5) + 0.05 * (8 - v))
        power = min(1.0, (v / 12) ** 3)
        cells = [f"{v:.3f}", f"{math.sin(k / 40):.4f}", f"{max(0.0, v - 12) * 2:.2f}", f"{power:.4f}"]
        if 556 <= k < 559:
            cells[3] = "NaN"
        writer.writerow([k * 600, *cells])
    return out.getvalue()

def read_table(text):
    table = []
    for row in csv.DictReader(io.StringIO(text)):
        table.append([float(row[c]) for c in COLUMNS])  # CAUSE
    return torch.tensor(table)

class Forecaster(nn.Module):
    def __init__(self, n_in, hidden=48):
        super().__init__()
        self.conv = nn.Conv1d(n_in, hidden, 3, padding=1)
        self.mix = nn.Linear(hidden * WINDOW, 64)
        self.quantiles = nn.Linear(64, HORIZON * 3)

    def forward(self, x):
        h = torch.relu(self.conv(x.transpose(1, 2))).flatten(1)
        return self.quantiles(torch.relu(self.mix(h))).view(-1, HORIZON, 3)

def pinball(pred, target, q=torch.tensor([0.1, 0.5, 0.9])):
    diff = target.unsqueeze(-1) - pred
    return torch.maximum(q * diff, (q - 1) * diff).mean()

def windows(table):
    step = WINDOW + HORIZON
    chunks = table[: len(table) // step * step].view(-1, step, len(COLUMNS))
    for b in range(0, len(chunks) - BATCH + 1, BATCH):
        part = chunks[b:b + BATCH]
        yield part[:, :WINDOW], part[:, WINDOW:, 3]

table = read_table(scada_export())
table[:, 0] /= 12.0
table[:, 2] /= 10.0
model = Forecaster(len(COLUMNS))
MODULES = [model]
watch(*MODULES)
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2048.0, growth_interval=1000)
for epoch in range(3):
    total = []
    for x, y in windows(table):  # CAUSE
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            pred = model(x)
        loss = pinball(pred.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        scaler.step(opt)
        scaler.update()
        total.append(loss.item())
    print(f"epoch {epoch} pinball {sum(total) / len(total):.4f} steps {len(total)}")
