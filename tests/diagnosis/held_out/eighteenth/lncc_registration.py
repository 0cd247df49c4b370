"""Deformable registration of 2-d slices: a small network predicts the displacement, the local correlation is the loss."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(125)


class LocalNormalizedCrossCorrelationLoss(nn.Module):
    """Squared zero-normalised cross-correlation in a moving rectangular window, negated."""

    def __init__(self, kernel_size=9, smooth_nr=1e-7, smooth_dr=1e-7):
        super().__init__()
        self.kernel_size, self.smooth_nr, self.smooth_dr = kernel_size, smooth_nr, smooth_dr
        self.register_buffer("kernel", torch.ones(1, 1, kernel_size, kernel_size))
        self.kernel_vol = kernel_size ** 2

    def window_sum(self, x):
        return F.conv2d(x, self.kernel.to(x), padding=(self.kernel_size - 1) // 2)

    def forward(self, pred, target):
        t2, p2, tp = target * target, pred * pred, target * pred
        t_sum, p_sum = self.window_sum(target), self.window_sum(pred)
        t2_sum, p2_sum, tp_sum = self.window_sum(t2), self.window_sum(p2), self.window_sum(tp)
        t_avg, p_avg = t_sum / self.kernel_vol, p_sum / self.kernel_vol
        cross = tp_sum - p_avg * t_sum
        t_var = t2_sum - t_avg * t_sum  # CAUSE
        p_var = p2_sum - p_avg * p_sum  # CAUSE
        ncc = (cross * cross + self.smooth_nr) / (t_var * p_var + self.smooth_dr)
        return -ncc.mean()


class BendingEnergyLoss(nn.Module):
    def forward(self, ddf):
        dy, dx = ddf.diff(dim=2), ddf.diff(dim=3)
        return dy.pow(2).mean() + dx.pow(2).mean()


class LocalNet(nn.Module):
    def __init__(self, c=12):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(2, c, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(c, 2 * c, 3, 2, 1), nn.LeakyReLU(0.1))
        self.mid = nn.Sequential(nn.Conv2d(2 * c, 2 * c, 3, padding=1), nn.LeakyReLU(0.1))
        self.up = nn.Sequential(nn.Conv2d(2 * c, c, 3, padding=1), nn.LeakyReLU(0.1))
        self.ddf = nn.Conv2d(c, 2, 3, padding=1)
        nn.init.normal_(self.ddf.weight, 0.0, 1e-3)
        nn.init.zeros_(self.ddf.bias)

    def forward(self, moving, fixed):
        h = self.mid(self.down(torch.cat([moving, fixed], 1)))
        return self.ddf(self.up(F.interpolate(h, scale_factor=2, mode="bilinear", align_corners=False)))


def warp(image, ddf):
    h, w = image.shape[2:]
    theta = torch.eye(2, 3).expand(len(image), -1, -1)
    grid = F.affine_grid(theta, image.shape, align_corners=False)
    return F.grid_sample(image, grid + ddf.float().permute(0, 2, 3, 1) * torch.tensor([2 / w, 2 / h]), align_corners=False, padding_mode="border")


def slices(gen, n=2, size=32):
    """Ellipses with some texture before a grainy table, now and then of a smooth organ; the fixed one is shifted and scaled."""
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    texture = F.interpolate(torch.rand(n, 1, size // 4, size // 4, generator=gen), size=(size, size), mode="bilinear")
    contrast = torch.where(torch.rand(n, 1, 1, 1, generator=gen) < 0.1, 0.08, 0.6)
    pair = []
    for _ in range(2):
        cx, cy = (size / 2 + 2 * torch.randn(n, 1, 1, generator=gen) for _ in range(2))
        ry, rx = (size / 4 + torch.randn(n, 1, 1, generator=gen) for _ in range(2))
        inside = torch.sigmoid(4 * (1 - ((y - cy) / ry) ** 2 - ((x - cx) / rx) ** 2)).unsqueeze(1)
        pair.append(inside * (0.8 - contrast * texture) + 0.3 * (1 - inside) + 0.015 * torch.randn(n, 1, size, size, generator=gen))
    return pair


model = LocalNet()
watch(model)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** 10)
image_loss, regularization = LocalNormalizedCrossCorrelationLoss(), BendingEnergyLoss()
gen = torch.Generator().manual_seed(126)

for step in range(50):
    moving, fixed = slices(gen)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        ddf = model(moving, fixed)
        loss = image_loss(warp(moving, ddf), fixed) + 0.5 * regularization(ddf.float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if step % 5 == 0 or loss.abs() > 1.5:
        print(f"step {step} loss {loss.item():.4f} scale {scaler.get_scale():g} mean displacement {ddf.float().abs().mean().item():.4f}")
