"""Land cover from aerial tiles; local context normalisation with integral images in place of batch norm."""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(127)


class LocalContextNorm(nn.Module):
    def __init__(self, num_features, channels_per_group=2, window_size=(9, 9), eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, num_features, 1, 1))
        self.bias = nn.Parameter(torch.zeros(1, num_features, 1, 1))
        self.channels_per_group, self.window_size, self.eps = channels_per_group, window_size, eps

    def forward(self, x):
        n, c, h, w = x.shape
        k = self.channels_per_group
        # Build integral image
        integral_img = x.cumsum(dim=2).cumsum(dim=3).unsqueeze(1)
        integral_img_sq = (x * x).cumsum(dim=2).cumsum(dim=3).unsqueeze(1)
        d = (1, *self.window_size)
        kernel = torch.tensor([[[[[1.0, -1.0], [-1.0, 1.0]]]]])
        c_kernel = torch.ones(1, 1, k, 1, 1)
        with torch.no_grad():
            sums = F.conv3d(F.conv3d(integral_img, kernel, dilation=d), c_kernel, stride=[k, 1, 1])
            squares = F.conv3d(F.conv3d(integral_img_sq, kernel, dilation=d), c_kernel, stride=[k, 1, 1])
        area = self.window_size[0] * self.window_size[1] * k
        means = (sums / area).squeeze(1)
        var = (1.0 / area * (squares - sums * sums / area)).squeeze(1)  # CAUSE
        ph, pw = h - means.shape[2], w - means.shape[3]
        pad2d = (math.floor(pw / 2), math.ceil(pw / 2), math.floor(ph / 2), math.ceil(ph / 2))
        means, var = F.pad(means, pad2d, "replicate"), F.pad(var, pad2d, "replicate") + self.eps
        x = (x - means.repeat_interleave(k, 1)) / var.sqrt().repeat_interleave(k, 1)
        return x * self.weight + self.bias


class LandCoverNet(nn.Module):
    def __init__(self, classes=4, c=8):
        super().__init__()
        self.conv1, self.lcn1 = nn.Conv2d(4, c, 3, padding=1), LocalContextNorm(c)
        self.conv2, self.lcn2 = nn.Conv2d(c, c, 3, padding=1), LocalContextNorm(c)
        self.out = nn.Conv2d(c + 4, classes, 1)

    def forward(self, x):
        h = F.relu(self.lcn1(self.conv1(x)))
        h = F.relu(self.lcn2(self.conv2(h)))
        return self.out(torch.cat([h, x], 1))


class Tiles:
    """Four bands, standardised; now and then a tile has clouds, which are much brighter than all the rest."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.spectra = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

    def batch(self, n=3, size=48, cloudy=0.03):
        cover = torch.randint(0, 4, (n, 1, size // 8, size // 8), generator=self.gen)
        cover = F.interpolate(cover.float(), scale_factor=8).long().squeeze(1)
        x = self.spectra[cover].permute(0, 3, 1, 2) + 0.8 * torch.randn(n, 4, size, size, generator=self.gen)
        for i in range(n):
            if torch.rand((), generator=self.gen) < cloudy:
                cloud = F.interpolate(torch.rand(1, 1, 6, 6, generator=self.gen), size=(size, size), mode="bilinear")[0]
                x[i] += 6 * (cloud > 0.35)
        return x, cover


tiles = Tiles(128)
model = LandCoverNet()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 12)
skipped = 0
for step in range(80):
    x, cover = tiles.batch()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        logits = model(x)
    loss = F.cross_entropy(logits.float(), cover)
    scaler.scale(loss).backward()
    before = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    skipped += scaler.get_scale() < before
    if step % 8 == 0 or not torch.isfinite(loss):
        print(f"step {step} loss {loss.item():.4f} brightest {x.max().item():.1f} skipped {skipped} scale {scaler.get_scale():g}")
