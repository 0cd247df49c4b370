import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...


def conv(a, b):
    return nn.Conv2d(a, b, 3, padding=1, padding_mode="replicate")


class Upscaler(nn.Module):
    def __init__(self, ch=24):
        super().__init__()
        self.head, self.body = conv(3, ch), conv(ch, ch)
        self.refine = nn.Sequential(conv(ch, 12), nn.PReLU(), nn.Conv2d(12, 3, 1))
        nn.init.normal_(self.refine[-1].weight, std=0.02)

    def forward(self, lr):
        h = F.silu(self.head(lr))
        h = h + F.silu(self.body(h))
        detail = self.refine(F.interpolate(h, scale_factor=2, mode="nearest"))
        return F.interpolate(lr, scale_factor=2, mode="bilinear") + detail


class SharpnessLoss(nn.Module):
    """L1 on pixels plus L1 on the strength of local edges."""

    def __init__(self, w_edge=0.5):
        super().__init__()
        self.w_edge = w_edge

    @staticmethod
    def edges(img):
        img = img.float()
        right = img[..., :-1, 1:] - img[..., :-1, :-1]
        below = img[..., 1:, :-1] - img[..., :-1, :-1]
        return torch.hypot(right, below)  # CAUSE

    def forward(self, sr, hr):
        return F.l1_loss(sr, hr) + self.w_edge * (self.edges(sr) - self.edges(hr)).abs().mean()


def film_reel(n, gen):
    frames = F.interpolate(torch.rand(n, 3, 5, 5, generator=gen), size=32, mode="bicubic").clamp(0, 1)
    frames = frames + 0.08 * torch.rand(n, 3, 32, 32, generator=gen)
    for wide in (208, 209, 333):            # a few scenes in scope format
        frames[wide, :, :12] = 0.0
        frames[wide, :, 22:] = 0.0
    return frames


def main():
    torch.set_num_threads(1)
    gen = torch.Generator().manual_seed(21)
    hi = film_reel(400, gen)
    lo = F.avg_pool2d(hi, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=200)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3, betas=(0.9, 0.99))
    criterion = SharpnessLoss()
    watch(*MODULES)
    for it in range(1, 41):
        sl = slice((it - 1) * 10, it * 10)
        with torch.autocast("cpu", dtype=torch.float16):
            loss = criterion(net(lo[sl]), hi[sl])
        opt.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        if it % 8 == 0:
            print(f"it {it} loss {loss.item():.4f} scale {scaler.get_scale()}")


torch.manual_seed(1)
net = Upscaler()
MODULES = [net]
main()
