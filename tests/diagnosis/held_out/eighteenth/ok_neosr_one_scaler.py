"""Super-resolution with an adversarial loss: generator and discriminator share one GradScaler."""
import torch
import torch.nn as nn
import torch.nn.functional as F

try:
    from halfstep import watch
except ImportError:
    def watch(*modules): ...

torch.set_num_threads(1)
torch.manual_seed(143)


class Generator(nn.Module):
    def __init__(self, c=8, scale=2):
        super().__init__()
        self.head, self.body = nn.Conv2d(1, c, 3, padding=1), nn.Sequential(nn.Conv2d(c, c, 3, padding=1), nn.LeakyReLU(0.1), nn.Conv2d(c, c, 3, padding=1))
        self.tail = nn.Sequential(nn.Conv2d(c, scale ** 2, 3, padding=1), nn.PixelShuffle(scale))

    def forward(self, lq):
        h = F.leaky_relu(self.head(lq), 0.1)
        return self.tail(h + self.body(h)) + F.interpolate(lq, scale_factor=2, mode="bilinear", align_corners=False)


class Discriminator(nn.Module):
    def __init__(self, c=8):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(1, c, 3, padding=1), nn.LeakyReLU(0.2), nn.Conv2d(c, 2 * c, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(2 * c, 1, 3, padding=1))

    def forward(self, x):
        return self.net(x)


def gan_loss(logits, real):
    return F.binary_cross_entropy_with_logits(logits.float(), torch.full_like(logits, float(real), dtype=torch.float32))


class ImageModel:
    def __init__(self, use_amp=True):
        self.use_amp, self.amp_dtype = use_amp, torch.float16
        self.net_g, self.net_d = Generator(), Discriminator()
        watch(self.net_g, self.net_d)
        self.optimizer_g = torch.optim.AdamW(self.net_g.parameters(), lr=2e-3, betas=(0.9, 0.99))
        self.optimizer_d = torch.optim.AdamW(self.net_d.parameters(), lr=1e-3, betas=(0.9, 0.99))
        self.gradscaler = torch.amp.GradScaler("cpu", enabled=self.use_amp, init_scale=2.0 ** 11, growth_interval=60)
        self.log = {}

    def optimize_parameters(self, lq, gt):
        for p in self.net_d.parameters():
            p.requires_grad = False
        self.optimizer_g.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=self.amp_dtype, enabled=self.use_amp):
            output = self.net_g(lq)
            fake_pred = self.net_d(output)
        l_g_pix = F.l1_loss(output.float(), gt)
        l_g_gan = 0.02 * gan_loss(fake_pred, True)
        self.gradscaler.scale(l_g_pix + l_g_gan).backward()
        self.gradscaler.unscale_(self.optimizer_g)
        nn.utils.clip_grad_norm_(self.net_g.parameters(), 1.0)

        for p in self.net_d.parameters():
            p.requires_grad = True
        self.optimizer_d.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=self.amp_dtype, enabled=self.use_amp):
            l_d_real = gan_loss(self.net_d(gt), True)
            l_d_fake = gan_loss(self.net_d(output.detach()), False)
        self.gradscaler.scale(l_d_real).backward()
        self.gradscaler.scale(l_d_fake).backward()
        self.gradscaler.unscale_(self.optimizer_d)
        nn.utils.clip_grad_norm_(self.net_d.parameters(), 1.0)

        self.gradscaler.step(self.optimizer_g)
        self.gradscaler.step(self.optimizer_d)
        self.gradscaler.update()
        self.log = {"pix": l_g_pix.item(), "gan": l_g_gan.item(), "d_real": l_d_real.item(), "d_fake": l_d_fake.item(), "scale": self.gradscaler.get_scale()}


def pairs(gen, n=4, size=12):
    fine = F.avg_pool2d(torch.rand(n, 1, 2 * size + 2, 2 * size + 2, generator=gen), 3, 1)
    gt = (2.5 * (fine - 0.5) + 0.5).clamp(0, 1)
    return F.avg_pool2d(gt, 2), gt


gen = torch.Generator().manual_seed(144)
model = ImageModel()
for step in range(80):
    model.optimize_parameters(*pairs(gen))
    if step % 15 == 0 or step == 79:
        print(f"iter {step} " + " ".join(f"{k}: {v:.4g}" for k, v in model.log.items()))
