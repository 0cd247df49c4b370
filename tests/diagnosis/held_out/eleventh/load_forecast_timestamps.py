"""Electric load from a timestamp and the temperature: Fourier features of the time, bf16 autocast."""
import math
from contextlib import contextmanager

import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(3)
HOURS_PER_YEAR = 8766.0


class TimeEncoding(nn.Module):
    """sin and cos of the daily, weekly and yearly cycles, and their first harmonics."""

    def __init__(self):
        super().__init__()
        periods = torch.tensor([24.0, 12.0, 168.0, 84.0, HOURS_PER_YEAR])
        self.register_buffer("omega", (2 * math.pi / periods)[None, :])

    def forward(self, hours):
        angle = hours[:, None] @ self.omega  # CAUSE
        angle = angle.float()
        return torch.cat([angle.sin(), angle.cos()], -1)


class LoadModel(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.time = TimeEncoding()
        self.temperature = nn.Sequential(nn.Linear(1, 16), nn.GELU())
        self.trunk = nn.Sequential(nn.Linear(26, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
        self.out = nn.Linear(width, 1)

    def forward(self, hours, celsius):
        z = torch.cat([self.time(hours), self.temperature(celsius[:, None])], -1)
        return self.out(self.trunk(z)).squeeze(-1)


def load_curve(hours, celsius):
    day = torch.cos(2 * math.pi * (hours % 24 - 18) / 24) + 0.4 * torch.cos(4 * math.pi * (hours % 24 - 9) / 24)
    weekend = ((hours // 24) % 7 >= 5).float()
    return day - 0.8 * weekend + 0.015 * (celsius - 15).abs()


def sampler(batch, generator, first_hour=0, last_hour=4 * HOURS_PER_YEAR):
    while True:
        hours = torch.randint(int(first_hour), int(last_hour), (batch,), generator=generator).float()
        celsius = 12 - 10 * torch.cos(2 * math.pi * hours / HOURS_PER_YEAR) + 3 * torch.randn(batch, generator=generator)
        yield hours, celsius, load_curve(hours, celsius)


@contextmanager
def training_precision():
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16):
        yield


def fit(steps=100):
    model = LoadModel()
    watch(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    batches = sampler(256, torch.Generator().manual_seed(14))
    average = None
    for step in range(steps):
        hours, celsius, load = next(batches)
        with training_precision():
            prediction = model(hours, (celsius - 12) / 8)
        loss = nn.functional.mse_loss(prediction.float(), load)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        average = loss.item() if average is None else 0.9 * average + 0.1 * loss.item()
        if step % 10 == 9:
            print(f"{step + 1:3d} mse {average:.4f} lr {schedule.get_last_lr()[0]:.2e}")
    return model


if __name__ == "__main__":
    fit()
