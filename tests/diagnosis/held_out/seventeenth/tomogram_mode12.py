"""Noise2noise denoising of cryo-tomograms, even against odd half; the volumes are 16-bit float files (mrc mode 12)."""
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(111)


def reconstruct(seed, shape=(48, 64, 64), dtype=np.float16):
    """Stands for the reconstruction: membranes as bright shells, and two halves with independent noise."""
    rng = np.random.default_rng(seed)
    z, y, x = np.meshgrid(*(np.arange(s) for s in shape), indexing="ij")
    volume = np.zeros(shape)
    for _ in range(6):
        cz, cy, cx, r = rng.uniform(8, 40), rng.uniform(8, 56), rng.uniform(8, 56), rng.uniform(5, 12)
        radius = np.sqrt((z - cz) ** 2 + (y - cy) ** 2 + (x - cx) ** 2)
        volume += 6 * np.exp(-((radius - r) ** 2) / 3)
    return tuple((12 + volume + rng.normal(0, 3, shape)).astype(dtype) for _ in range(2)), volume


class TrainSetN2N:
    """Sub-volumes of even and odd halves, normalised with the statistics of the middle slices."""

    def __init__(self, tomograms, cube_size=16):
        self.cube_size, self.even, self.odd, self.mean, self.std = cube_size, [], [], [], []
        for even, odd in tomograms:
            self.even.append(even)
            self.odd.append(odd)
            self._load_statistics(even, odd)

    def _load_statistics(self, even, odd):
        Z = even.shape[0]
        self.mean.append([np.mean(even[Z // 2 - 16:Z // 2 + 16]), np.mean(odd[Z // 2 - 16:Z // 2 + 16])])
        self.std.append([np.std(even[Z // 2 - 16:Z // 2 + 16]), np.std(odd[Z // 2 - 16:Z // 2 + 16])])  # CAUSE

    def load_and_normalize(self, volumes, index, z, y, x, half):
        h = self.cube_size // 2
        subvolume = volumes[index][z - h:z + h, y - h:y + h, x - h:x + h]
        return (subvolume - self.mean[index][half]) / self.std[index][half]

    def sample(self, rng):
        index = rng.integers(len(self.even))
        z, y, x = (rng.integers(8, s - 8) for s in self.even[index].shape)
        even = self.load_and_normalize(self.even, index, z, y, x, 0)
        odd = self.load_and_normalize(self.odd, index, z, y, x, 1)
        pair = [np.array(v, dtype=np.float32)[np.newaxis] for v in (even, odd)]
        return pair if rng.random() > 0.5 else pair[::-1]

    def batch(self, rng, n=2):
        x, y = zip(*(self.sample(rng) for _ in range(n)))
        return torch.from_numpy(np.stack(x)), torch.from_numpy(np.stack(y))


class UNet3d(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.LeakyReLU(0.1))
        self.enc2 = nn.Sequential(nn.Conv3d(width, 2 * width, 3, 2, 1), nn.LeakyReLU(0.1))
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv3d(2 * width, width, 3, padding=1), nn.LeakyReLU(0.1))
        self.out = nn.Conv3d(2 * width, 1, 3, padding=1)

    def forward(self, x):
        a = self.enc1(x)
        return self.out(torch.cat([a, self.up(self.enc2(a))], 1))


def main(steps=40):
    tomograms, truths = zip(*(reconstruct(seed) for seed in (1, 2, 3)))
    data, rng = TrainSetN2N(tomograms), np.random.default_rng(112)
    net = UNet3d()
    watch(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
    for step in range(steps):
        x1, x2 = data.batch(rng)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.smooth_l1_loss(net(x1).float(), x2)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if step % 10 == 0 or step == steps - 1:
            print(f"{step:3d} loss {loss.item():.6f}")
    with torch.no_grad():
        part = tomograms[0][0][16:32, 16:48, 16:48]
        x = (part - data.mean[0][0]) / data.std[0][0]
        pred = net(torch.from_numpy(np.array(x, dtype=np.float32))[None, None])[0, 0].numpy()
    truth = truths[0][16:32, 16:48, 16:48]
    r = np.corrcoef(pred.ravel(), truth.ravel())[0, 1]
    print(f"predicted tomogram: mean {pred.mean():.4f} std {pred.std():.4f} correlation with the truth {r:.3f}")


if __name__ == "__main__":
    main()
