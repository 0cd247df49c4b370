"""Remaining-capacity regression from battery cycler logs that arrive as one file a week (bfloat16)."""
import pathlib
import tempfile

import numpy as np
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(17)

WEEKS, PER_WEEK, WINDOW, BATCH = 8, 48, 64, 8
CHANNELS = ("current", "voltage", "temperature")


def write_cycler_logs(folder, seed=5):
    """What the lab's export writes: raw windows (cell, channel, time) and the measured capacity."""
    r = np.random.default_rng(seed)
    t = np.arange(WINDOW) / WINDOW
    for week in range(WEEKS):
        health = 1.0 - 0.03 * week - 0.1 * r.random(PER_WEEK)
        phase = r.random((PER_WEEK, 1))
        current = 2.5 * np.sign(np.sin(2 * np.pi * (2 * t + phase))) + 0.05 * r.standard_normal((PER_WEEK, WINDOW))
        voltage = 3.7 + 0.4 * np.sin(2 * np.pi * (2 * t + phase)) / health[:, None]
        voltage += 0.01 * r.standard_normal((PER_WEEK, WINDOW))
        temperature = 25 + 6 * np.abs(current) * (1.4 - health[:, None]) + 0.2 * r.standard_normal((PER_WEEK, WINDOW))
        if week == 6:  # storage test: two cells stand on the shelf, disconnected
            current[[11, 30]] = 0.0
        np.savez(folder / f"week{week:02d}.npz", capacity=health.astype(np.float32),
                 **dict(zip(CHANNELS, (a.astype(np.float32) for a in (current, voltage, temperature)))))


def load_week(path):
    log = np.load(path)
    raw = np.stack([log[c] for c in CHANNELS], axis=1)
    mean = raw.mean(axis=-1, keepdims=True)
    std = raw.std(axis=-1, keepdims=True)
    stats = np.concatenate([mean[..., 0], std[..., 0]], axis=1) / np.float32(10)
    with np.errstate(invalid="ignore"):
        shape = (raw - mean) / std  # CAUSE
    return torch.from_numpy(shape), torch.from_numpy(stats), torch.from_numpy(log["capacity"])


class CapacityNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(3, width, 7, stride=2, padding=3), nn.SiLU(),
                                  nn.Conv1d(width, width, 5, stride=2, padding=2), nn.SiLU(),
                                  nn.AdaptiveAvgPool1d(4), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(4 * width + 6, 48), nn.SiLU(), nn.Linear(48, 1))

    def forward(self, shape, stats):
        return self.head(torch.cat([self.conv(shape), stats], dim=1)).squeeze(1)


def main():
    model = CapacityNet()
    watch(model)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=1e-3)
    step = 0
    with tempfile.TemporaryDirectory() as tmp:
        folder = pathlib.Path(tmp)
        write_cycler_logs(folder)
        for path in sorted(folder.glob("week*.npz")):
            shape, stats, capacity = load_week(path)
            for pass_ in range(2):
                for rows in torch.arange(PER_WEEK).split(BATCH):
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        pred = model(shape[rows], stats[rows])
                    loss = 50 * (pred.float() - capacity[rows]).square().mean()
                    opt.zero_grad(set_to_none=True)
                    loss.backward()
                    opt.step()
                    step += 1
            print(f"{path.name} step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
