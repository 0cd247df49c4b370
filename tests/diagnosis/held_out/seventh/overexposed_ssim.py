import torch
from torch import nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(31)


class SSIM(nn.Module):
    """structural similarity on 8-bit range, 7x7 gaussian window"""

    def __init__(self, size=7, sigma=1.5, peak=255.0):
        super().__init__()
        x = torch.arange(size) - size // 2
        k = torch.exp(-x.float().square() / (2 * sigma ** 2))
        k = k / k.sum()
        self.register_buffer("win", torch.outer(k, k)[None, None])
        self.c1, self.c2 = (0.01 * peak) ** 2, (0.03 * peak) ** 2

    def blur(self, t):
        c = t.size(1)
        return F.conv2d(t, self.win.expand(c, 1, -1, -1), groups=c, padding=self.win.size(-1) // 2)

    def forward(self, a, b):
        mu_a, mu_b = self.blur(a), self.blur(b)
        dev_a, dev_b = a - mu_a, b - mu_b
        var_a, var_b, cov = self.blur(dev_a * dev_a), self.blur(dev_b * dev_b), self.blur(dev_a * dev_b)
        structure = (2 * cov + self.c2) / (var_a + var_b + self.c2)
        luminance = (2 * mu_a * mu_b + self.c1) / (mu_a.square() + mu_b.square() + self.c1)  # CAUSE
        return (luminance.float() * structure.float()).mean()


class Denoiser(nn.Module):
    def __init__(self, ch=20):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, ch, 3, padding=1), nn.PReLU(ch),
            nn.Conv2d(ch, ch, 3, padding=1), nn.PReLU(ch),
            nn.Conv2d(ch, 3, 3, padding=1),
        )

    def forward(self, img):
        x = img / 255.0
        return (x + self.body(x)) * 255.0


class Photos:
    def __init__(self, seed=8):
        self.g = torch.Generator().manual_seed(seed)

    def __call__(self, idx, n=6, s=20):
        low = torch.rand(n, 3, 5, 5, generator=self.g)
        clean = F.interpolate(low, size=(s, s), mode="bilinear", align_corners=False) * 130 + 15
        if idx % 16 == 12:                                   # sky shots
            clean[:2] = clean[:2] * 0.12 + 215
        noisy = (clean + 9 * torch.randn(clean.shape, generator=self.g)).clamp(0, 255)
        return noisy, clean


net, ssim, photos = Denoiser(), SSIM(), Photos()
MODULES = [net, ssim]
opt = torch.optim.Adam(net.parameters(), lr=1.5e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=300)
watch(*MODULES)

for it in range(60):
    noisy, clean = photos(it)
    with torch.autocast("cpu", dtype=torch.float16):
        out = net(noisy)
        quality = ssim(out, clean.to(out.dtype))
        loss = (1.0 - quality) + 0.02 * F.l1_loss(out.float(), clean)
    opt.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(opt)
    scaler.update()
    if it % 12 == 0:
        print(f"[{it:02d}] loss {loss.item():.4f} ssim {quality.item():.4f} scale {scaler.get_scale():.0f}")
