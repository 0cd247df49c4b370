"""Crop type from small multispectral tiles in a raw binary file, with vegetation indices as extra channels."""
import os
import tempfile

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(19)

TILES, BANDS, SIDE, CROPS = 720, 4, 12, 5
BLUE, GREEN, RED, NIR = range(BANDS)


def write_archive(path, seed=3):
    """uint16 reflectances of a mosaic; tiles at the border of the swath are cut."""
    rng = np.random.default_rng(seed)
    crop = rng.integers(CROPS, size=TILES)
    spectrum = rng.uniform(300, 3000, size=(CROPS, BANDS))
    tiles = spectrum[crop][:, :, None, None] * rng.uniform(0.7, 1.3, size=(TILES, 1, SIDE, SIDE))
    tiles = tiles + rng.normal(0, 120, size=tiles.shape)
    tiles = tiles.clip(1, 10000).astype(np.uint16)
    for tile in (211, 508):
        tiles[tile, :, :, SIDE - 3:] = 0
    tiles.tofile(path)
    return crop


class TileArchive(torch.utils.data.Dataset):
    def __init__(self, path, crop):
        self.tiles = np.memmap(path, dtype=np.uint16, mode="r", shape=(TILES, BANDS, SIDE, SIDE))
        self.crop = torch.from_numpy(crop)

    def __len__(self):
        return len(self.crop)

    def __getitem__(self, i):
        bands = self.tiles[i].astype(np.float32)
        with np.errstate(all="ignore"):
            ndvi = (bands[NIR] - bands[RED]) / (bands[NIR] + bands[RED])  # CAUSE
            ndwi = (bands[GREEN] - bands[NIR]) / (bands[GREEN] + bands[NIR])  # CAUSE
        return torch.from_numpy(np.concatenate([bands / 3000.0, ndvi[None], ndwi[None]])), self.crop[i]


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1), nn.Conv2d(c, c, 3, padding=1)
        self.na, self.nb = nn.GroupNorm(4, c), nn.GroupNorm(4, c)

    def forward(self, x):
        return x + self.b(F.relu(self.nb(self.a(F.relu(self.na(x))))))


def build(width=16):
    return nn.Sequential(nn.Conv2d(BANDS + 2, width, 3, stride=2, padding=1), Residual(width), Residual(width),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CROPS))


def train(path, epochs=2):
    archive = TileArchive(path, write_archive(path))
    loader = torch.utils.data.DataLoader(archive, batch_size=16, shuffle=True, drop_last=True,
                                         generator=torch.Generator().manual_seed(15))
    model = build()
    watch(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 9, growth_interval=300)
    step = 0
    for epoch in range(epochs):
        hits = 0
        for tiles, crop in loader:
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cpu", dtype=torch.float16):
                logits = model(tiles)
                loss = F.cross_entropy(logits, crop, label_smoothing=0.05)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            hits += int((logits.argmax(1) == crop).sum())
            if step % 10 == 0:
                print(f"{step:3d} loss {loss.item():.4f} scale {scaler.get_scale():g}")
            step += 1
        print(f"epoch {epoch} accuracy {hits / len(archive):.3f}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        train(os.path.join(folder, "mosaic.raw"))
