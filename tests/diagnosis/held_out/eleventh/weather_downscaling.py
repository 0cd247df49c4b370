"""Statistical downscaling: coarse temperature and humidity fields to station temperatures."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
STATIONS, GRID, DAYS = 20, 12, 480


def write_archive(path):
    """Daily archive as exported from netCDF with ncdump defaults: float32, days in order."""
    rng = np.random.default_rng(12)
    season = 10 * np.sin(2 * np.pi * np.arange(DAYS) / 365)[:, None, None]
    coarse = np.stack([season + rng.normal(0, 3, (DAYS, GRID, GRID)),
                       60 + rng.normal(0, 12, (DAYS, GRID, GRID))], 1).astype(np.float32)
    rows, cols = rng.integers(0, GRID, STATIONS), rng.integers(0, GRID, STATIONS)
    lapse = rng.normal(0, 4, STATIONS)
    station = coarse[:, 0, rows, cols] - lapse + rng.normal(0, 0.5, (DAYS, STATIONS))
    station = station.astype(np.float32)
    outages = np.array([(217, 3), (218, 3), (219, 3), (341, 11), (402, 7), (403, 7)])
    station[outages[:, 0], outages[:, 1]] = np.float32(9.96921e36)
    np.savez(path, coarse=coarse, station=station)


class Archive(torch.utils.data.Dataset):
    def __init__(self, path, train_days=200):
        with np.load(path) as data:
            self.coarse = data["coarse"]
            self.station = data["station"]  # CAUSE
        self.centre = self.coarse[:train_days].mean((0, 2, 3), keepdims=True)[0]
        self.spread = self.coarse[:train_days].std((0, 2, 3), keepdims=True)[0]
        self.station_mean = self.station[:train_days].mean(0)

    def __len__(self):
        return len(self.station)

    def __getitem__(self, i):
        x = (self.coarse[i] - self.centre) / self.spread
        return torch.from_numpy(x), torch.from_numpy(self.station[i] - self.station_mean)


class Downscaler(nn.Sequential):
    def __init__(self, c=16):
        super().__init__(
            nn.Conv2d(2, c, 3, padding=1), nn.GroupNorm(4, c), nn.SiLU(),
            nn.Conv2d(c, c, 3, padding=1), nn.GroupNorm(4, c), nn.SiLU(),
            nn.AvgPool2d(2), nn.Flatten(), nn.Linear(c * 36, STATIONS))


def walk_forward(dataset, window=8):
    """Online training in order of time, one window of days per step."""
    for start in range(0, len(dataset) - window + 1, window):
        yield torch.utils.data.default_collate([dataset[i] for i in range(start, start + window)])


def main(path):
    torch.manual_seed(1)
    model = Downscaler()
    watch(model)
    optimizer = torch.optim.NAdam(model.parameters(), lr=5e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=1000)
    losses = []
    for step, (x, y) in enumerate(walk_forward(Archive(path))):
        with torch.autocast("cpu", dtype=torch.float16):
            out = model(x)
            loss = (out.float() - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        if step % 6 == 5:
            print(f"window {step:2d} mse {np.mean(losses[-6:]):.3f} scale {scaler.get_scale():g}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        archive = os.path.join(folder, "archive.npz")
        write_archive(archive)
        main(archive)
